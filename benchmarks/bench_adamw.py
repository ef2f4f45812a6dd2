# SPDX-License-Identifier: Apache-2.0
"""The AdamW step on the CPU: our one pass against torch, DeepSpeedCPUAdam and stock ZeRO-3's chain."""

from __future__ import annotations

from collections.abc import Callable

import ours_adamw
import pytest
from agreement import check_agreement, check_equal
from baselines import bandwidth, deepspeed_adam, torch_adamw
from interleave import Comparison, Contender, Measure, Samples, collect, race
from problem import Entry, Problem
from replay import recorded_clock
from report import Report

pytestmark = pytest.mark.timeout(3600)

# Bytes per element, read + written. Adam alone: parameter, gradient and two moments read (4 x 4), three
# of them written (3 x 4). With a bf16 gradient 2 less are read, and the bf16 weight is 2 more written.
OURS_FP32 = Measure("ours, fp32 gradient", "ours_fp32", ("step",), 28)
OURS_BF16 = Measure("ours, bf16 gradient, bf16 write", "ours_bf16", ("step",), 28)
TORCH = Measure("torch AdamW(fused=True), fp32", "torch_fused", ("step",), 28)
DEEPSPEED = Measure("DeepSpeedCPUAdam alone, fp32", "deepspeed_adam", ("adam",), 28)
CHAIN = Measure(
    "stock ZeRO-3 chain, bf16 gradient", "deepspeed_chain", ("hand_over", "unscale", "adam", "write_back"), 56
)
CHAIN_STEP = Measure("  the part in step()", "deepspeed_chain", ("unscale", "adam", "write_back"), 42)
# Cast to a temporary (2 + 4), copy of it (4 + 4).
HAND_OVER = Measure("  the part in backward: cast, copy", "deepspeed_chain", ("hand_over",), 14)
UNSCALE = Measure("  of step: unscale", "deepspeed_chain", ("unscale",), 8)
ADAM = Measure("  of step: DeepSpeedCPUAdam", "deepspeed_chain", ("adam",), 28)
WRITE_BACK = Measure("  of step: write bf16", "deepspeed_chain", ("write_back",), 6)
COPY = Measure("memory: fp32 copy", "bandwidth", ("copy",), 8)
SCALE = Measure("memory: fp32 scale in place", "bandwidth", ("scale",), 8)

MEASURES = (
    OURS_FP32, TORCH, DEEPSPEED, OURS_BF16, CHAIN, CHAIN_STEP, HAND_OVER, UNSCALE, ADAM, WRITE_BACK,
    COPY, SCALE,
)  # fmt: skip
COMPARISONS = (
    Comparison("fp32 step", OURS_FP32, (DEEPSPEED, TORCH), target=0.97),
    Comparison("bf16 step, whole chain", OURS_BF16, (CHAIN,), target=1.8),
    Comparison("bf16 step, only the chain's part in step()", OURS_BF16, (CHAIN_STEP,), target=None),
)

TOLERANCE = 1e-4
"""fp32 masters: the formulas differ in where they round. A wrong decay or scale is off by 1e-2 and more."""


def _check_same_work(entries: dict[str, Entry], problem: Problem) -> list[str]:
    """Compare all masters with ours, and each low-precision weight with its own master; return the notes."""
    reference = entries["ours_bf16"]
    notes = []
    for name, entry in entries.items():
        if entry is not reference:
            off = check_agreement(name, entry.master, reference.master, problem.start, tolerance=TOLERANCE)
            notes.append(f"same work: the fp32 master of {name} is {off:.1e} of the way gone from ours")
        if entry.weight is not None:
            check_equal(f"{name}: bf16 weight", entry.weight, entry.master.bfloat16())
            notes.append(f"same work: the bf16 weight of {name} is its master, rounded to nearest even")
    return notes


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config, publish: Callable[[Report], Report]) -> Report:
    elements, rounds = pytestconfig.getoption("elements"), pytestconfig.getoption("rounds")
    problem = Problem.make(elements)
    entries: dict[str, Entry] = {}

    def keep(name: str, make: Callable[[Problem], Entry]) -> tuple[str, Callable[[], Contender]]:
        def factory() -> Contender:
            entries[name] = make(problem)
            return entries[name].contender

        return name, factory

    contenders, not_measured = collect(
        [
            keep("ours_fp32", ours_adamw.fp32),
            keep("deepspeed_adam", deepspeed_adam.alone),
            keep("ours_bf16", ours_adamw.bf16),
            keep("deepspeed_chain", deepspeed_adam.chain),
            keep("torch_fused", torch_adamw.fused),
            ("bandwidth", lambda: bandwidth.run(elements)),
        ]
    )
    samples: Samples = race(contenders, rounds=rounds, warmup_rounds=pytestconfig.getoption("warmup_rounds"))
    samples.not_measured = not_measured
    notes = _check_same_work(entries, problem)
    return publish(
        Report(
            "AdamW step on the CPU", elements, rounds, samples, MEASURES, COMPARISONS, (COPY, SCALE), notes
        )
    )


@pytest.mark.benchmark(timer=recorded_clock)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.label.strip())
def test_row(measure: Measure, report: Report, record: Callable[[Report, Measure], None]) -> None:
    record(report, measure)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.label)
def test_target(comparison: Comparison, report: Report, hold: Callable[[Report, Comparison], None]) -> None:
    hold(report, comparison)
