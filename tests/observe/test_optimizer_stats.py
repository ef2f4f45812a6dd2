# SPDX-License-Identifier: Apache-2.0
"""What is told of stored optimizer states: rates and what bounds a step, by hand, and the report's words."""

from __future__ import annotations

import pytest

from peftds_ext.observe.stats import OptimizerStats, OptimizerStep, Stats, StepStats

NOTHING = StepStats(
    seconds=0, compute_waited_seconds=0, layers_used=0, layers_resident=0, layers_ready=0, layers_waited_for=0
)


def step(seconds: float = 2.0, waited: float = 1.0) -> OptimizerStep:
    return OptimizerStep(
        seconds=seconds, waited_seconds=waited, read_bytes=3_000_000_000, written_bytes=1_000_000_000
    )


def test_both_directions_make_the_rate() -> None:
    assert step().gb_per_s == 2.0
    assert step(0.0, 0.0).gb_per_s is None


@pytest.mark.parametrize(
    ("waited", "bound"), [(0.0, "compute"), (0.09, "compute"), (0.11, "disk"), (2.0, "disk")]
)
def test_what_bounds_a_step(waited: float, bound: str) -> None:
    assert step(2.0, waited).bound_by == bound


def test_the_report() -> None:
    optimizer = OptimizerStats(
        form="7 elements as fp32 masters and fp32 moments",
        memory_bytes=0,
        disk_bytes=84_000_000,
        steps=1,
        last_step=step(),
    )
    stats = Stats(
        last_step=None,
        run=NOTHING,
        steps=0,
        host_bytes_held=0,
        host_bytes_peak=0,
        pinned_bytes=0,
        python_entries=0,
        optimizer=optimizer,
    )
    lines = str(stats).splitlines()
    assert lines[0] == "no layers are streamed yet"
    assert lines[-2] == ("optimizer states: 7 elements as fp32 masters and fp32 moments; 84.0MB on the disk")
    assert lines[-1] == (
        "  last step: 2.000 s, bound by disk; 3.0GB read, 1.0GB written, 2.00 GB/s, waited 1.000 s"
    )
