# SPDX-License-Identifier: Apache-2.0
"""Inf or NaN in a gradient skips the step as stock DeepSpeed does, and leaves nothing behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ds_models import Mlp, furthest, masters, moments, rows
from ds_runner import Runner
from ds_worker import Run

STEPS, BAD = 6, 2


def poisoned(run: Run, dtype: str, value: float, micro: int, clip: float) -> dict[str, Any]:
    """Train with one bad element in one gradient in one micro step of one window."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}} if dtype == "fp16" else {}
    model = Mlp()
    at = {"now": False}

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        if at["now"]:
            gradient = gradient.clone()
            gradient.view(-1)[7] = value
        return gradient

    model.optional.weight.register_hook(poison)
    config = run.config(dtype, gradient_accumulation_steps=2, gradient_clipping=clip, **fp16)
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 50}}
    engine = run.initialize(model, config | {"scheduler": scheduler})
    keys = ("skipped", "scales", "lr", "norms", "masters", "moments")
    record: dict[str, Any] = {key: [] for key in keys}
    for number, x in enumerate(rows(2 * STEPS)):
        at["now"] = number == 2 * BAD + micro
        engine.backward(engine(x.to(engine.get_data_types()[0])))
        engine.step()
        if number % 2:
            record["skipped"].append(engine.skipped_steps)
            record["scales"].append(float(engine.optimizer.cur_scale))
            record["lr"].append(engine.get_lr()[0])
            record["norms"].append(float(engine.get_global_grad_norm()))
            record["masters"].append(masters(engine))
            record["moments"].append(moments(engine))
    return record


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "value", "clip"),
    [("bf16", math.nan, 0.5), ("bf16", math.inf, 0.0), ("fp16", -math.inf, 0.5), ("fp16", math.nan, 0.0)],
)
def test_step_is_skipped_as_by_stock(
    runner: Runner, dtype: str, value: float, clip: float, micro: int
) -> None:
    arguments = {"dtype": dtype, "value": value, "clip": clip, "micro": micro}
    ours, stock = (o.result for o in runner.pair(poisoned, **arguments))
    assert ours["skipped"] == [0, 0, 1, 1, 1, 1]
    for key in ("skipped", "scales", "lr", "norms"):
        assert ours[key] == pytest.approx(stock[key], rel=1e-6), key
    for key in ("masters", "moments"):
        assert furthest(ours[key][BAD], ours[key][BAD - 1]) == 0.0
        assert furthest(ours[key][BAD + 1], ours[key][BAD]) > 0.0
        for mine, its in zip(ours[key], stock[key], strict=True):
            assert furthest(mine, its) <= 5e-7
