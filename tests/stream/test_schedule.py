# SPDX-License-Identifier: Apache-2.0
"""The transfer plan: every use has its bytes, and what is in memory stays within the budget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peftds_ext.stream.schedule import PlannedUse, plan_transfers

ORDERS = st.lists(st.integers(0, 4), min_size=1, max_size=14)
SIZES = st.lists(st.integers(0, 9), min_size=5, max_size=5)


def sweep(layers: int) -> list[int]:
    return [*range(layers), *reversed(range(layers))]


def replay(plan: Sequence[PlannedUse], sizes: Sequence[int], read_sizes: Sequence[int]) -> tuple[int, int]:
    """Follow a plan three times; returns the most bytes beside those in use and next, and the late reads."""
    kept: set[int] = set()
    ahead: list[int] = []
    most, late = 0, 0
    for use in range(3 * len(plan)):
        planned = plan[use % len(plan)]
        there = planned.layer in kept or sizes[planned.layer] == 0
        if use >= len(plan):
            assert planned.reads != there, "what is kept and what is read exclude each other"
            late += planned.reads and planned.layer not in ahead
        kept.discard(planned.layer)
        window = [plan[(use + n) % len(plan)] for n in range(1, planned.reach + 1)]
        ahead = [coming.layer for coming in window if coming.reads]
        most = max(most, sum(sizes[layer] for layer in kept) + sum(read_sizes[layer] for layer in ahead[1:]))
        if planned.kept:
            kept.add(planned.layer)
    return most, late


@given(ORDERS, SIZES, st.integers(0, 40), st.sampled_from([1, 3]))
def test_the_budget_holds_and_every_read_is_ahead(
    order: list[int], sizes: list[int], budget: int, converted: int
) -> None:
    read_sizes = [converted * size for size in sizes]
    most, late = replay(plan_transfers(order, sizes, budget, read_sizes), sizes, read_sizes)
    assert most <= budget
    assert late == 0


@pytest.mark.parametrize(("budget", "reads_on_the_way"), [(0, 1), (1, 2), (4, 5)])
def test_reading_runs_ahead_by_as_much_as_there_is_room(budget: int, reads_on_the_way: int) -> None:
    plan = plan_transfers(sweep(12), [1] * 12, budget)
    middle = plan[5]  # what stayed from the last pass is used up, and nothing is kept for the turn yet
    window = [plan[5 + n] for n in range(1, middle.reach + 1)]
    assert sum(use.reads for use in window) == reads_on_the_way


def test_layers_that_need_no_reading_are_reached_over() -> None:
    plan = plan_transfers([0, 1, 2, 3], [5, 0, 0, 5], 0)
    assert [(use.reads, use.reach) for use in plan] == [(True, 3), (False, 2), (False, 1), (True, 3)]


def test_what_fits_is_never_read_again() -> None:
    assert not any(use.reads for use in plan_transfers(sweep(6), [3] * 6, 18))


def test_an_order_of_nothing_has_no_plan() -> None:
    assert plan_transfers([], [], 0) == ()
