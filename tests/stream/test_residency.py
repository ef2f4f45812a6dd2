# SPDX-License-Identifier: Apache-2.0
"""What stays in memory: never more than the budget, and as much of it as helps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peftds_ext.stream.residency import kept_after


def largest_kept(order: Sequence[int], sizes: Sequence[int], kept: Sequence[bool]) -> int:
    """Replay the order; returns the most bytes that were kept beside the layer in use."""
    resident: set[int] = set()
    most = 0
    for use, layer in itertools.islice(itertools.cycle(enumerate(order)), 3 * len(order)):
        most = max(most, sum(sizes[other] for other in resident - {layer}))
        (resident.add if kept[use] else resident.discard)(layer)
    return most


def reads(order: Sequence[int], kept: Sequence[bool]) -> int:
    """Reads in one repetition, once it repeats."""
    return sum(not stays for stays in kept)


def sweep(layers: int) -> list[int]:
    return [*range(layers), *reversed(range(layers))]


@pytest.mark.parametrize(
    ("budget", "expected"), [(0, 22), (1, 20), (2, 18), (6, 10), (10, 2), (11, 0), (99, 0)]
)
def test_a_sweep_reads_each_layer_twice_but_those_that_fit(budget: int, expected: int) -> None:
    order = sweep(12)
    assert reads(order, kept_after(order, [1] * 12, budget)) == expected


def test_at_the_turn_the_last_layer_stays_without_a_budget() -> None:
    kept = kept_after(sweep(4), [5] * 4, 0)
    assert kept == (False, False, False, True, False, False, False, True)


def test_layers_of_no_size_always_stay() -> None:
    assert all(kept_after(sweep(3), [0, 7, 0], 0)[i] for i in (0, 2, 3, 5))


def test_nothing_is_kept_of_an_empty_order() -> None:
    assert kept_after([], [1], 10) == ()


ORDERS = st.lists(st.integers(0, 4), min_size=1, max_size=14)
SIZES = st.lists(st.integers(0, 9), min_size=5, max_size=5)


@given(ORDERS, SIZES, st.integers(0, 40))
def test_the_budget_is_never_exceeded(order: list[int], sizes: list[int], budget: int) -> None:
    assert largest_kept(order, sizes, kept_after(order, sizes, budget)) <= budget


@given(ORDERS, SIZES)
def test_what_fits_whole_stays_whole(order: list[int], sizes: list[int]) -> None:
    assert all(kept_after(order, sizes, sum(sizes)))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 5])
def test_in_a_sweep_over_layers_of_one_size_no_other_choice_reads_less(layers: int, budget: int) -> None:
    order, sizes = sweep(layers), [1] * layers
    ours = reads(order, kept_after(order, sizes, budget))
    choices = itertools.product((False, True), repeat=len(order))
    best = min(reads(order, kept) for kept in choices if largest_kept(order, sizes, kept) <= budget)
    assert ours == best
