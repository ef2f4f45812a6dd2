# SPDX-License-Identifier: Apache-2.0
"""The order in which layers are used, recorded in one pass and followed in the next ones.

A pass begins with the model's forward and ends where the next one begins, so that it is a forward with or
without its backward and its recomputation. Uses are numbers of layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

_REMEMBERED: Final = 8
"""Orders that are kept: training, evaluation and generation of a few lengths. A model that never repeats
itself records anew each time, at the cost of a list."""


class Orders:
    """Follows the present pass along the recorded ones.

    A pass that ends early, such as an evaluation's forward, is the beginning of a longer one and needs no
    order of its own. One that takes another turn is compared with the others that are remembered; if none
    fits, nothing is foretold until it ends, and then it is remembered itself.
    """

    def __init__(self, guess: Sequence[int] = ()) -> None:
        """Know nothing yet; the first pass is taken to go along ``guess``, as far as it does."""
        self._guess = tuple(guess)
        self._known: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._passed: list[int] = []
        self._followed: tuple[int, ...] | None = None
        self.records = 0
        """Passes that were recorded, which is what a changing order costs."""

    def begin(self, expected: Sequence[int] = ()) -> None:
        """Begin a pass: what was seen of the last one is remembered.

        The latest order is followed, unless another one is ``expected``.
        """
        done = tuple(self._passed)
        if done and not any(order[: len(done)] == done for order in self._known):
            for order in [known for known in self._known if done[: len(known)] == known]:
                del self._known[order]  # the beginning of what is now known whole
            self._remember(done)
            self.records += 1
        elif done in self._known:
            self._remember(done)
        if expected:
            self._remember(tuple(expected))
        self._passed = []
        self._followed = next(reversed(self._known), None)
        if done:
            self._guess = ()
        elif self._followed is None:
            self._followed = self._guess or None

    def _remember(self, order: tuple[int, ...]) -> None:
        self._known[order] = None
        self._known.move_to_end(order)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def use(self, layer: int) -> None:
        """Note the use of a layer."""
        position = len(self._passed)
        self._passed.append(layer)
        order = self._followed
        if order is not None and (position >= len(order) or order[position] != layer):
            self._followed = self._other_order()

    @property
    def first(self) -> int | None:
        """The layer that this pass began with."""
        return self._passed[0] if self._passed else None

    @property
    def position(self) -> int:
        """Uses so far in this pass."""
        return len(self._passed)

    @property
    def known(self) -> tuple[tuple[int, ...], ...]:
        """The orders that are remembered."""
        return tuple(self._known)

    @property
    def followed(self) -> tuple[int, ...] | None:
        """The recorded order that this pass agrees with so far, or None if there is none."""
        return self._followed

    def _other_order(self) -> tuple[int, ...] | None:
        done = tuple(self._passed)
        fitting = (order for order in reversed(self._known) if order[: len(done)] == done)
        return next(fitting, None)
