# SPDX-License-Identifier: Apache-2.0
"""Stored optimizer states with two ranks: a file each, the training of CPU offload, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_models import furthest, llama, lora, masters, moments, tokens
from ds_runner import Runner
from ds_worker import Run


def engine_of(run: Run, tier: str, disk: str, stage: int, states: str, seed: int = 1, **zero: Any) -> Any:
    offload = {"device": tier} | ({"nvme_path": disk} if tier == "nvme" else {})
    config = run.config(stage=stage, zero={"offload_optimizer": offload, **zero})
    if stage == 3:
        config["zero_optimization"]["sub_group_size"] = 500
    config["peftds_ext"] = {"enabled": True, "optimizer": {"states": states}}
    # Seven rows of an adapter are not divided evenly among two ranks.
    return run.initialize(lora(llama(), seed=seed, r=7), config)


def step(engine: Any, run: Run, batch: torch.Tensor) -> float:
    part = batch.chunk(run.world)[run.rank]
    loss = engine(input_ids=part, labels=part).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def train(
    run: Run, tier: str, disk: str, folder: str, stage: int, states: str, **zero: Any
) -> dict[str, Any]:
    engine = engine_of(run, tier, disk, stage, states, **zero)
    batches = tokens(6, batch=4)
    losses = [step(engine, run, batch) for batch in batches[:3]]
    engine.save_checkpoint(folder, tag="three")
    late = getattr(engine.optimizer, "_peftds_late", None) is not None
    files = [str(path) for path in Path(disk).rglob("data.bin")]
    losses += [step(engine, run, batch) for batch in batches[3:]]
    result = {"losses": losses, "masters": masters(engine), "moments": moments(engine), "late": late}
    return {**result, "files": files, "norm": float(engine.get_global_grad_norm())}


def resume(run: Run, tier: str, disk: str, folder: str, stage: int, states: str) -> dict[str, Any]:
    engine = engine_of(run, tier, disk, stage, states, seed=9)
    engine.load_checkpoint(folder, tag="three")
    losses = [step(engine, run, batch) for batch in tokens(6, batch=4)[3:]]
    return {"losses": losses, "masters": masters(engine), "moments": moments(engine)}


@pytest.mark.parametrize(("stage", "states"), [(1, "int8"), (2, "fp32"), (3, "int8")])
def test_two_ranks_train_and_resume_as_in_memory(
    runner: Runner, tmp_path: Path, stage: int, states: str
) -> None:
    options = {"disk": str(tmp_path / "disk"), "stage": stage, "states": states}
    (memory,) = runner.run(train, "ours", world=2, tier="cpu", folder=str(tmp_path / "a"), **options)
    (disk,) = runner.run(train, "ours", world=2, tier="nvme", folder=str(tmp_path / "b"), **options)
    (resumed,) = runner.run(resume, "ours", world=2, tier="nvme", folder=str(tmp_path / "b"), **options)
    for ours, expected, again in zip(disk, memory, resumed, strict=True):
        assert len(ours.result["files"]) == 2
        assert ours.result["losses"] == expected.result["losses"]
        assert again.result["losses"] == expected.result["losses"][3:]
        for name in ("masters", "moments"):
            assert furthest(ours.result[name], expected.result[name]) == 0.0
            assert furthest(again.result[name], expected.result[name]) == 0.0


def test_two_ranks_step_late(runner: Runner, tmp_path: Path) -> None:
    options = {
        "disk": str(tmp_path / "disk"),
        "stage": 3,
        "states": "fp32",
        "stage3_param_persistence_threshold": 0,
    }
    (memory,) = runner.run(train, "ours", world=2, tier="cpu", folder=str(tmp_path / "a"), **options)
    (disk,) = runner.run(train, "ours", world=2, tier="nvme", folder=str(tmp_path / "b"), **options)
    for ours, expected in zip(disk, memory, strict=True):
        assert ours.result["late"]
        assert not expected.result["late"]
        assert ours.result["losses"] == expected.result["losses"]
        assert furthest(ours.result["masters"], expected.result["masters"]) == 0.0
