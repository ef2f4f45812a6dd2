# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe with two ranks: each keeps its own part, and losses are those of CPU offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_nvme import (
    LARGE_ADAPTER,
    batches,
    configured,
    lora_on,
    result_of,
    shape_for_disk,
    swapper_of,
    train_step,
)
from ds_runner import Runner
from ds_worker import Run

CASES: dict[str, dict[str, Any]] = {
    "default settings": {},
    "everything released at once": {"zero": {"stage3_max_reuse_distance": 0}},
    "trainable beyond max_in_cpu": {"adapter": {**LARGE_ADAPTER, "r": 2048}, "offload": {"max_in_cpu": 0}},
    "uneven partitions": {"model": {"intermediate_size": 2051}},
}


def train(
    run: Run,
    device: str,
    model: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    offload: dict[str, Any] | None = None,
) -> dict[str, Any]:
    # A partition is half of a parameter, so that parameters are twice as large as with one rank.
    whole = lora_on(shape_for_disk(**{"intermediate_size": 2048, **(model or {})}), **(adapter or {}))
    engine = run.initialize(
        whole, configured(run, device, run.tmp.parent / "disk", zero or {}, offload or {})
    )
    losses = [train_step(engine, batch) for batch in batches(4, run.rank)]
    result = result_of(engine, losses)
    swapper = swapper_of(engine)
    result["file"] = str(swapper._records.path) if swapper is not None else None
    return result


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_losses_of_cpu_offload(runner: Runner, case: str) -> None:
    (on_cpu,) = runner.run(train, "ours", world=2, device="cpu", **CASES[case])
    (on_disk,) = runner.run(train, "ours", world=2, device="nvme", **CASES[case])
    for cpu, disk in zip(on_cpu, on_disk, strict=True):
        assert disk.result["losses"] == cpu.result["losses"]
        assert all(torch.equal(disk.result["masters"][n], m) for n, m in cpu.result["masters"].items())
        assert disk.result["placement"]["frozen"] > 0
        assert (disk.result["placement"]["trainable"] > 0) == ("beyond max_in_cpu" in case)
        live, held = disk.result["memory"]
        assert held <= 1.05 * live
    assert on_disk[0].result["file"] != on_disk[1].result["file"]
