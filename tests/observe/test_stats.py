# SPDX-License-Identifier: Apache-2.0
"""Rates, shares and what bounds a step, by hand and with nothing to divide by; the report's words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peftds_ext.observe.report import report
from peftds_ext.observe.stats import Stats, StepStats, TierStats, union_length

INTERVALS = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), max_size=8)
EMPTY = StepStats(
    seconds=0, compute_waited_seconds=0, layers_used=0, layers_resident=0, layers_ready=0, layers_waited_for=0
)


def step(resident: int = 4, ready: int = 6, late: int = 2, **fields: Any) -> StepStats:
    counts = {"layers_resident": resident, "layers_ready": ready, "layers_waited_for": late}
    defaults = {"seconds": 2.0, "compute_waited_seconds": 0.5, "layers_used": resident + ready + late}
    return StepStats.model_validate({**defaults, **counts, **fields})


def stats(**fields: Any) -> Stats:
    defaults: dict[str, Any] = {"last_step": None, "run": EMPTY, "steps": 0, "host_bytes_held": 0}
    return Stats.model_validate(
        {**defaults, "host_bytes_peak": 0, "pinned_bytes": 0, "python_entries": 0, **fields}
    )


@given(INTERVALS)
def test_a_union_covers_what_lies_in_any_interval(intervals: list[tuple[int, int]]) -> None:
    covered = {point for start, end in intervals for point in range(start, end)}
    assert union_length(iter(intervals)) == len(covered)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(5, 5)], 0), ([(0, 4), (4, 6)], 6), ([(0, 10), (2, 3), (9, 12)], 12), ([(7, 9), (0, 1)], 3)],
)
def test_unions_by_hand(intervals: list[tuple[int, int]], length: int) -> None:
    assert union_length(intervals) == length


@pytest.mark.parametrize(
    ("size", "seconds", "rate"),
    [(3_000_000_000, 1.5, 2.0), (1, 1.0, 1e-9), (0, 1.0, 0.0), (0, 0.0, 0.0), (5, 0.0, None)],
)
def test_a_rate_is_in_billions_of_bytes(size: int, seconds: float, rate: float | None) -> None:
    assert TierStats(bytes=size, seconds=seconds).gb_per_s == rate


def test_shares_by_hand() -> None:
    assert step(4, 6, 2).read_ahead_hit_rate == 0.75
    assert step(4, 6, 2).resident_share == pytest.approx(1 / 3)
    assert (step(4, 0, 0).read_ahead_hit_rate, step(4, 0, 0).resident_share) == (None, 1.0)
    assert (step(0, 0, 5).read_ahead_hit_rate, step(0, 0, 5).resident_share) == (0.0, 0.0)
    assert (EMPTY.read_ahead_hit_rate, EMPTY.resident_share) == (None, None)


@pytest.mark.parametrize(
    ("seconds", "waited", "bound"),
    [
        (1, 0, "compute"),
        (1, 0.049, "compute"),
        (1, 0.05, "decode"),
        (1, 1, "decode"),
        (0, 0, "compute"),
        (0, 1, "decode"),
    ],
)
def test_a_step_is_bound_by_what_it_waited_for(seconds: float, waited: float, bound: str) -> None:
    fields = {"seconds": seconds, "compute_waited_seconds": waited}
    assert step(**fields, waited_for="decode").bound_by == bound
    assert step(**fields).bound_by == bound.replace("decode", "disk")


@pytest.mark.parametrize(
    "fields",
    [{"layers_used": 13}, {"ready": -1}, *({"seconds": value} for value in (-1, float("nan"), float("inf")))],
)
def test_numbers_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        step(**fields)


def test_statistics_are_frozen_and_survive_json() -> None:
    whole = stats(
        last_step=step(tiers={"disk": TierStats(bytes=2_000_000_000, seconds=0.5)}), run=step(), steps=1
    )
    text = whole.model_dump_json()
    last = json.loads(text)["last_step"]
    assert (last["bound_by"], last["read_ahead_hit_rate"]) == ("disk", 0.75)
    assert last["tiers"]["disk"] == {"bytes": 2_000_000_000, "seconds": 0.5, "gb_per_s": 4.0}
    assert Stats.model_validate_json(text) == whole
    with pytest.raises(ValidationError):
        whole.steps = 2  # type: ignore[misc]


def test_the_report_says_what_bounds_the_step_and_how_far_it_is() -> None:
    last = step(
        tiers={"disk": TierStats(bytes=2_000_000_000, seconds=0.5), "decode": TierStats(bytes=0, seconds=0)}
    )
    run = step(40, 0, 0, seconds=20.0, compute_waited_seconds=0)
    text = report(
        stats(
            last_step=last,
            run=run,
            steps=10,
            host_bytes_held=1_500_000_000,
            host_bytes_peak=2 * 10**9,
            pinned_bytes=500_000_000,
            python_entries=60,
        )
    )
    assert text.splitlines() == [
        "last step: 2.000 s, bound by disk; compute waited 0.500 s for disk, 25.0% of it: "
        "1.500 s without that",
        "  layers: 12 uses, 33.3% resident, read ahead in time 6 of 8 (75.0%)",
        "  disk: 2.0GB in 0.500 s, 4.00 GB/s",
        "  decode: nothing was transferred",
        "10 steps: 20.000 s, bound by compute; compute never waited",
        "  layers: 40 uses, 100.0% resident, none was read",
        "host memory: 1.5GB of weights, 2.0GB at most, 500.0MB pinned",
        "calls from Python: 60, 1.50 per use of a layer",
    ]


def test_the_report_of_a_run_without_steps_or_time() -> None:
    nothing = "host memory: 0B of weights, 0B at most, 0B pinned"
    assert report(stats()).splitlines() == ["no step has ended yet", nothing]
    timeless = step(
        0, 0, 0, seconds=0, compute_waited_seconds=0.5, tiers={"disk": TierStats(bytes=1, seconds=0)}
    )
    assert report(stats(last_step=timeless, run=timeless, steps=1)).splitlines() == [
        "last step: 0.000 s, bound by disk; compute waited 0.500 s for disk: 0.000 s without that",
        "  disk: 1B in no measurable time",
        nothing,
    ]
