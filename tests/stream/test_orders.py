# SPDX-License-Identifier: Apache-2.0
"""The order of layers: followed as soon as it repeats, given up at once when it does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peftds_ext.stream.plan import Orders

TRAIN, EVAL, OTHER = [0, 1, 2, 2, 1, 0], [0, 1, 2], [0, 2, 1]


def run(orders: Orders, uses: list[int]) -> list[tuple[int, ...] | None]:
    """Make one pass; returns what was followed after each use."""
    orders.begin()
    seen = []
    for layer in uses:
        orders.use(layer)
        seen.append(orders.followed)
    return seen


def test_the_second_pass_follows_the_first() -> None:
    orders = Orders()
    assert run(orders, TRAIN) == [None] * 6
    assert run(orders, TRAIN) == [tuple(TRAIN)] * 6
    assert orders.records == 1


def test_the_beginning_of_an_order_is_no_order_of_its_own() -> None:
    orders = Orders()
    run(orders, EVAL)
    run(orders, TRAIN)
    assert run(orders, EVAL) == [tuple(TRAIN)] * 3
    assert run(orders, TRAIN) == [tuple(TRAIN)] * 6
    assert orders.records == 2


def test_a_changed_order_is_given_up_at_the_use_that_differs_and_followed_the_next_time() -> None:
    orders = Orders()
    run(orders, TRAIN)
    assert run(orders, OTHER) == [tuple(TRAIN), None, None]
    assert run(orders, OTHER) == [tuple(OTHER)] * 3
    assert run(orders, TRAIN) == [tuple(OTHER), *[tuple(TRAIN)] * 5]


def test_orders_that_take_turns_are_recorded_once_each() -> None:
    orders = Orders()
    for _ in range(20):
        run(orders, TRAIN)
        run(orders, OTHER)
    run(orders, TRAIN)
    assert orders.records == 2


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=40))
def test_what_is_followed_always_agrees_with_what_has_passed(passes: list[list[int]]) -> None:
    orders = Orders()
    for uses in passes:
        for position, order in enumerate(run(orders, uses)):
            assert order is None or list(order[: position + 1]) == uses[: position + 1]
        assert orders.position == len(uses)
        assert orders.first == uses[0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_whatever_has_passed_last_is_followed_when_it_comes_again(uses: list[int]) -> None:
    orders = Orders()
    run(orders, uses)
    run(orders, uses)
    assert run(orders, uses)[-1] is not None


def test_the_first_pass_goes_along_a_guess_which_is_no_order_that_was_seen() -> None:
    orders = Orders(guess=[0, 1, 2, 2, 1, 0])
    shorter = [0, 1, 2, 2, 1]
    assert run(orders, shorter) == [(0, 1, 2, 2, 1, 0)] * 5
    assert run(orders, shorter) == [tuple(shorter)] * 5
    assert orders.records == 1


def test_a_wrong_guess_is_given_up_where_it_is_wrong() -> None:
    orders = Orders(guess=[0, 1, 2])
    assert run(orders, OTHER) == [(0, 1, 2), None, None]
    assert run(orders, OTHER) == [tuple(OTHER)] * 3
