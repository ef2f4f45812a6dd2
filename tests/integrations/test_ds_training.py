# SPDX-License-Identifier: Apache-2.0
"""LoRA training with the engine gives stock DeepSpeed's losses, step by step, in every dtype and stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ds_models import furthest, llama, lora, relative, tokens, train_tokens
from ds_runner import Runner, compiler_missing
from ds_worker import Run

STEPS, ACCUMULATION = 20, 3
ADAMS = [
    "torch_adam",
    pytest.param("cpu_adam", marks=pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())),
]
Train = Callable[..., tuple[Any, Any]]


def train_lora(run: Run, dtype: str, stage: int, steps: int = STEPS) -> dict[str, Any]:
    # Gradients overflow in fp16 at this scale, which is halved until they do not.
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 23, "hysteresis": 1}} if dtype == "fp16" else {}
    config = run.config(
        dtype, stage, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=ACCUMULATION, **fp16
    )
    model = lora(llama(hidden=128, layers=4), target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    engine = run.initialize(model, config)
    record = train_tokens(engine, tokens(steps * ACCUMULATION, batch=4, length=64))
    record["kernel"] = type(getattr(engine.optimizer.optimizer, "ds_opt_adam", None)).__name__
    return record


@pytest.fixture(scope="session")
def train(runner: Runner) -> Train:
    """Train with the engine, once per dtype and stage, and with stock; return both results."""
    done: dict[tuple[str, int], Any] = {}

    def train(dtype: str, stage: int, adam: str = "torch_adam", **options: Any) -> tuple[Any, Any]:
        modes = ["stock"] if (dtype, stage) in done else ["stock", "ours"]
        runs = runner.run(train_lora, *modes, adam=adam, dtype=dtype, stage=stage, **options)
        results = [run[0].result for run in runs]
        return done.setdefault((dtype, stage), results[-1]), results[0]

    return train


@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_losses_are_those_of_stock(
    train: Train, dtype: str, adam: str, measured: Callable[..., None]
) -> None:
    ours, stock = train(dtype, 3, adam)
    measured(
        losses=relative(ours["losses"], stock["losses"]),
        norms=relative(ours["norms"], stock["norms"]),
        first=furthest(ours["first"], stock["first"]),
        last=furthest(ours["last"], stock["last"]),
    )
    assert len(ours["losses"]) == STEPS * ACCUMULATION
    assert relative(ours["losses"], stock["losses"]) <= 1e-4
    # One step apart by rounding only: masters are up to 1 here, of which 2e-7 is the last bit or two.
    assert furthest(ours["first"], stock["first"]) <= 2e-7
    assert ours["scales"] == stock["scales"]
    assert ours["skipped"] == stock["skipped"]
    if dtype == "fp16":
        assert 0 < ours["skipped"][-1] < STEPS // 2
        assert ours["scales"][-1] < ours["scales"][0]


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_run_the_kernel_and_build_nothing(
    train: Train, stage: int, tmp_path: Path, measured: Callable[..., None]
) -> None:
    ours, stock = train("bf16", stage, steps=8, env={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    measured(losses=relative(ours["losses"], stock["losses"]), first=furthest(ours["first"], stock["first"]))
    assert ours["kernel"] == "KernelCpuAdam"
    assert list(tmp_path.iterdir()) == []
    assert furthest(ours["first"], stock["first"]) <= 2e-7
    # Later, a master that differs in its last bit can round to the other bf16 weight; this is what
    # torch's AdamW and DeepSpeed's own differ by, too.
    assert relative(ours["losses"], stock["losses"]) <= 3e-4
