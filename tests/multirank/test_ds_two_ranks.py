# SPDX-License-Identifier: Apache-2.0
"""Two ranks: partitions, padding, reduction and the decision to skip a step are those of stock DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_models import (
    Mlp,
    adamw_by_torch,
    furthest,
    gradients,
    llama,
    lora,
    masters,
    moments,
    relative,
    rows,
    tokens,
    train_tokens,
)
from ds_runner import Runner, compiler_missing
from ds_worker import Run

WORLD, STEPS, ACCUMULATION = 2, 20, 3
ADAMS = [
    "torch_adam",
    pytest.param("cpu_adam", marks=pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())),
]
Train = Callable[..., list[Any]]


def train_lora(run: Run, dtype: str, stage: int) -> dict[str, Any]:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 23, "hysteresis": 1}} if dtype == "fp16" else {}
    config = run.config(dtype, stage, gradient_accumulation_steps=ACCUMULATION, **fp16)
    model = lora(llama(hidden=64, layers=4), target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    engine = run.initialize(model, config)
    return train_tokens(engine, tokens(STEPS * ACCUMULATION, batch=4, length=64, seed=run.rank))


@pytest.fixture(scope="session")
def train(runner: Runner) -> Train:
    """Train once per dtype, stage and kind of run; return the results of the ranks."""
    done: dict[tuple[Any, ...], list[Any]] = {}

    def train(dtype: str, stage: int, mode: str, adam: str = "torch_adam") -> list[Any]:
        key = (dtype, stage, mode, adam)
        if key not in done:
            options = {"dtype": dtype, "stage": stage, "adam": adam, "world": WORLD}
            done[key] = [outcome.result for outcome in runner.run(train_lora, mode, **options)[0]]
        return done[key]

    return train


@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_losses_are_those_of_stock(
    train: Train, dtype: str, adam: str, measured: Callable[..., None]
) -> None:
    pairs = list(zip(train(dtype, 3, "ours"), train(dtype, 3, "stock", adam), strict=True))
    measured(
        losses=max(relative(ours["losses"], stock["losses"]) for ours, stock in pairs),
        norms=max(relative(ours["norms"], stock["norms"]) for ours, stock in pairs),
        first=max(furthest(ours["first"], stock["first"]) for ours, stock in pairs),
        last=max(furthest(ours["last"], stock["last"]) for ours, stock in pairs),
    )
    assert pairs[0][0]["losses"] != pairs[1][0]["losses"]  # each rank has data of its own
    assert furthest(pairs[0][0]["last"], pairs[1][0]["last"]) == 0.0  # and all have the same weights
    for ours, stock in pairs:
        assert len(ours["losses"]) == STEPS * ACCUMULATION
        assert relative(ours["losses"], stock["losses"]) <= 1e-4
        assert furthest(ours["first"], stock["first"]) <= 3e-7
        assert (ours["scales"], ours["skipped"]) == (stock["scales"], stock["skipped"])
        assert (0 < ours["skipped"][-1] < STEPS // 2) is (dtype == "fp16")


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2(train: Train, stage: int, measured: Callable[..., None]) -> None:
    pairs = list(zip(train("fp32", stage, "ours"), train("fp32", stage, "stock"), strict=True))
    measured(losses=max(relative(ours["losses"], stock["losses"]) for ours, stock in pairs))
    for ours, stock in pairs:
        assert relative(ours["losses"], stock["losses"]) <= 1e-4
        assert furthest(ours["first"], stock["first"]) <= 3e-7


class Odd(Mlp):
    """Parameters of 225, 15 and 1 elements: padded, and one of which the second rank has nothing."""

    def __init__(self) -> None:
        super().__init__(width=15)
        self.single = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        return super().forward(x * self.single, skip=skip)


SKIPS = [(False, False), (True, False), (True, True), (False, False)]


def train_odd(run: Run, sub_group_size: int, clip: float) -> dict[str, Any]:
    zero = {"sub_group_size": sub_group_size}
    config = run.config("fp32", gradient_accumulation_steps=2, gradient_clipping=clip, zero=zero)
    engine = run.initialize(Odd(), config)
    data = rows(16, width=15)
    norms = []
    for step, skips in enumerate(SKIPS):
        for micro, skip in enumerate(skips):
            engine.backward(engine(data[8 * run.rank + 2 * step + micro], skip=skip))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return {"masters": masters(engine), "moments": moments(engine), "norms": norms}


@pytest.mark.parametrize("sub_group_size", [10**9, 100])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_padding_and_missing_gradients_against_torch(
    runner: Runner, sub_group_size: int, clip: float
) -> None:
    options = {"sub_group_size": sub_group_size, "clip": clip, "world": WORLD}
    results = [outcome.result for outcome in runner.run(train_odd, "ours", **options)[0]]
    data = rows(16, width=15)
    windows = [
        [
            lambda model, x=data[8 * rank + 2 * step + micro], skip=skip: model(x, skip=skip)
            for rank in range(WORLD)
            for micro, skip in enumerate(skips)
        ]
        for step, skips in enumerate(SKIPS)
    ]
    reference = adamw_by_torch(Odd(), windows, clip=clip)
    for result in results:
        assert furthest(result["masters"], reference) <= 1e-6  # four steps of 1e-3
        assert result["norms"] == results[0]["norms"]


def poison_one_rank(run: Run, dtype: str) -> dict[str, Any]:
    model = Odd()
    at = {"now": False}
    model.always.weight.register_hook(lambda g: g.fill_(math.nan) if at["now"] else g)
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}} if dtype == "fp16" else {}
    engine = run.initialize(model, run.config(dtype, **fp16))
    record: dict[str, Any] = {"masters": [], "skipped": [], "scales": []}
    for step, x in enumerate(rows(4, width=15)):
        at["now"] = step == 1 and run.rank == 1
        engine.backward(engine(x.to(engine.get_data_types()[0])))
        engine.step()
        record["masters"].append(masters(engine))
        record["skipped"].append(engine.skipped_steps)
        record["scales"].append(float(engine.optimizer.cur_scale))
    return record


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_nan_on_one_rank_skips_on_both(runner: Runner, dtype: str) -> None:
    ours, stock = runner.run(poison_one_rank, "ours", "stock", dtype=dtype, world=WORLD)
    for mine, its in zip(ours, stock, strict=True):
        assert mine.result["skipped"] == its.result["skipped"] == [0, 1, 1, 1]
        assert mine.result["scales"] == its.result["scales"]
        history = mine.result["masters"]
        assert furthest(history[1], history[0]) == 0.0
        for a, b in zip(history, its.result["masters"], strict=True):
            assert furthest(a, b) <= 5e-7


def access(run: Run) -> dict[str, Any]:
    from deepspeed.utils import (
        safe_get_full_grad,
        safe_get_local_grad,
        safe_set_full_grad,
        safe_set_local_grad,
    )

    # Of an even number of elements: with padding, stock cannot set a full gradient.
    engine = run.initialize(Mlp(), run.config("bf16", gradient_clipping=0.0))
    named = dict(engine.module.named_parameters())
    full, local = named["optional.weight"], named["always.weight"]
    record = {}
    for step, x in enumerate(rows(3)):
        engine.backward(engine((x + run.rank).bfloat16()))
        record[f"gradients {step}"] = gradients(engine)
        safe_set_full_grad(full, safe_get_full_grad(full).float() * 2)
        safe_set_local_grad(local, safe_get_local_grad(local).float() + 0.5)
        record[f"set {step}"] = gradients(engine)
        engine.step()
        record[f"after {step}"] = gradients(engine)
    return {**record, "masters": masters(engine), "moments": moments(engine)}


def test_gradients_are_read_and_set_as_in_stock(runner: Runner) -> None:
    ours, stock = runner.run(access, "ours", "stock", world=WORLD)
    for mine, its in zip(ours, stock, strict=True):
        for name in its.result:
            assert furthest(mine.result[name], its.result[name]) <= 1e-6, name


def save_or_resume(run: Run, folder: str, resume: bool) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    config = run.config("bf16", zero={"sub_group_size": 100})
    engine = run.initialize(Odd(), config)
    data = rows(6, width=15)
    record: dict[str, Any] = {}
    for step in range(3 if resume else 0, 6):
        if step == 3 and resume:
            engine.load_checkpoint(folder, tag="step")
        elif step == 3:
            record["saved"] = masters(engine)
            engine.save_checkpoint(folder, tag="step")
        engine.backward(engine((data[step] + run.rank).bfloat16()))
        engine.step()
    torch.distributed.barrier()
    consolidated = get_fp32_state_dict_from_zero_checkpoint(folder, "step")
    record["consolidated"] = {name: tensor.clone() for name, tensor in consolidated.items()}
    return {**record, "masters": masters(engine), "moments": moments(engine)}


def test_checkpoint(runner: Runner, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "world": WORLD}
    saved = [o.result for o in runner.run(save_or_resume, "ours", resume=False, **options)[0]]
    resumed = [o.result for o in runner.run(save_or_resume, "ours", resume=True, **options)[0]]
    for before, after in zip(saved, resumed, strict=True):
        assert furthest(after["masters"], before["masters"]) == 0.0
        assert furthest(after["moments"], before["moments"]) == 0.0
        assert furthest(before["consolidated"], before["saved"]) == 0.0
