# SPDX-License-Identifier: Apache-2.0
"""Two ranks that copy their parts of layers to stand-ins for GPUs: one gather a use, and the same losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_layers import CASES, LAYERS, configured, on_a_device, train
from ds_nvme import batches, lora_on, shape_for_disk, train_step
from ds_runner import Runner
from ds_worker import Run


@pytest.mark.parametrize("case", ["plain", "checkpointing", "tied embeddings"])
def test_parts_are_copied_ahead_and_gathered(runner: Runner, case: str) -> None:
    in_memory = runner.run(train, "ours", world=2, tier="cpu", **CASES[case])[0]
    runs: list[dict[str, Any]] = [
        {"tier": "cpu", "device": "lazy", "device_budget": 0},
        {"tier": "nvme", "device": "eager", "budget": 0, "device_budget": 3 << 20},
    ]
    for settings in runs:
        streamed = runner.run(train, "ours", world=2, **settings, **CASES[case])[0]
        for ours, theirs in zip(streamed, in_memory, strict=True):
            assert ours.result["losses"] == theirs.result["losses"], settings
            assert all(torch.equal(ours.result["masters"][n], m) for n, m in theirs.result["masters"].items())
            counts = ours.result["counts"]
            assert counts["ready"] > counts["demanded"] > 0


def inference_first(run: Run, device: str = "") -> list[float]:
    if device:
        on_a_device(device)
    engine = run.initialize(lora_on(shape_for_disk(num_hidden_layers=LAYERS)), configured(run, "cpu", None))
    engine.eval()
    with torch.inference_mode():
        losses = [float(engine(input_ids=batch, labels=batch).loss) for batch in batches(2, run.rank)]
    engine.train()
    return losses + [train_step(engine, batch) for batch in batches(3, run.rank)]


def test_training_may_come_after_inference(runner: Runner) -> None:
    in_memory, ours = (
        [outcome.result for outcome in runner.run(inference_first, "ours", world=2, device=device)[0]]
        for device in ("", "behind")
    )
    assert ours == in_memory
