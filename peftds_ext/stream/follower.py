# SPDX-License-Identifier: Apache-2.0
"""Which layers stay in one memory and which come next: a plan for each order, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence

from peftds_ext.stream.plan import Orders
from peftds_ext.stream.schedule import PlannedUse, plan_transfers


class PlanFollower:
    """Records the order of uses, plans it, and follows it, as long as the pass goes along.

    It knows layers by number and their sizes, and nothing of how they come and go: whoever moves them tells
    each use and its end, and lets go what it is told to.
    """

    def __init__(self, layers: int, budget: int) -> None:
        """Follow the uses of ``layers`` layers.

        ``budget`` is how many bytes of layers may be there beside the one that is in use and the next one
        that is brought.
        """
        self._budget = budget
        # What most models do. A wrong guess costs one layer that is brought in vain.
        self._orders = Orders([*range(layers), *reversed(range(layers))])
        self._sizes = [0] * layers
        self._sizes_on_the_way = [0] * layers
        self._plans: dict[tuple[int, ...], tuple[PlannedUse, ...]] = {}
        self._plan: tuple[PlannedUse, ...] | None = None
        self._staying: set[int] = set()
        self._for_the_next: int | None = None  # the layer that stays since it is used again at once
        self._latest = -1

    def resize(self, layer: int, size: int, on_the_way: int) -> None:
        """Say how many bytes a layer takes, and while it is brought; 0 if it need not be brought."""
        if (size, on_the_way) != (self._sizes[layer], self._sizes_on_the_way[layer]):
            self._sizes[layer], self._sizes_on_the_way[layer] = size, on_the_way
            self._plans.clear()
            self._plan = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes by layer."""
        return tuple(self._sizes)

    @property
    def sizes_on_the_way(self) -> tuple[int, ...]:
        """Bytes by layer while it is brought."""
        return tuple(self._sizes_on_the_way)

    @property
    def records(self) -> int:
        """Passes whose order was new."""
        return self._orders.records

    @property
    def plan(self) -> tuple[PlannedUse, ...] | None:
        """What is followed now; None where the pass goes along no order that is known."""
        return self._plan

    @property
    def position(self) -> int:
        """Uses so far in this pass."""
        return self._orders.position

    @property
    def staying(self) -> frozenset[int]:
        """The layers that stay until their next use."""
        return frozenset(self._staying)

    # -- uses -------------------------------------------------------------------------------------------

    def begin_pass(self, expected: Sequence[int] = ()) -> None:
        """The model's forward begins; uses will be those ``expected``, if that is known beforehand."""
        self._orders.begin(expected)

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""
        return self._orders.first == layer

    def make_room(self, layer: int) -> list[int]:
        """Return the layers that are to be let go before another one's use begins.

        There are such where the pass takes another turn than the plan has counted on.
        """
        going = self._in_excess(beside=layer)
        if self._for_the_next in self._staying - {layer}:  # kept for a use at once, which does not come
            self._staying.discard(self._for_the_next)
            going.append(self._for_the_next)
        return going

    def use(self, layer: int) -> bool:
        """The use of a layer begins; returns whether another plan is followed from now on."""
        self._orders.use(layer)
        self._staying.discard(layer)
        self._latest = layer
        return self._follow()

    def leave(self, layer: int) -> list[int]:
        """The use of a layer has ended; returns the layers that are to be let go."""
        self._for_the_next = None
        if not self._is_kept(layer):
            return [layer, *self._in_excess(beside=self._latest)]
        self._staying.add(layer)
        if self._plan is not None and self._plan[self._orders.position % len(self._plan)].layer == layer:
            self._for_the_next = layer
        return self._in_excess(beside=layer)

    def most(self, planned: frozenset[int]) -> int:
        """Layers that may be on their way: one where more stays than the plan has counted on."""
        return len(self._sizes) if self._staying <= planned else 1

    def to_bring(self) -> list[int]:
        """Return the layers to bring in a pass that begins now, in their order, if it goes as planned."""
        order, there, brought = self._orders.followed, set(self._staying), []
        if order is not None and order[0] != self._for_the_next:
            there.discard(self._for_the_next)
        for use in () if order is None else self._plan_of(order):
            if self._sizes[use.layer] and use.layer not in there:
                brought.append(use.layer)
            if use.kept:
                there.add(use.layer)
            else:
                there.discard(use.layer)
        return brought

    def coming(self) -> list[int]:
        """Return the layers to bring during this use, in the order of their uses in the rest of the pass."""
        if self._plan is None:
            return []
        now = self._orders.position - 1
        this = self._plan[now]
        there = self._staying | ({this.layer} if this.kept else set())
        within = (use.layer for use in self._plan[now + 1 : now + 1 + this.reach])
        layers = dict.fromkeys(layer for layer in within if self._sizes[layer] and layer not in there)
        return list(layers)[: self.most(this.staying)]

    # -- the plan ---------------------------------------------------------------------------------------

    def _follow(self) -> bool:
        """Follow the plan of the order that this pass agrees with, if there is one."""
        order = self._orders.followed
        before, self._plan = self._plan, None if order is None else self._plan_of(order)
        return self._plan is not before

    def _plan_of(self, order: tuple[int, ...]) -> tuple[PlannedUse, ...]:
        plan = self._plans.get(order)
        if plan is None:
            known = {known: self._plans[known] for known in self._orders.known if known in self._plans}
            plan = plan_transfers(order, self._sizes, self._budget, self._sizes_on_the_way)
            self._plans = {**known, order: plan}
        return plan

    def _is_kept(self, layer: int) -> bool:
        position = self._orders.position - 1
        if self._plan is None or position < 0 or self._plan[position].layer != layer:
            return False
        return self._plan[position].kept

    def _in_excess(self, beside: int) -> list[int]:
        """Take off layers that another order wanted to stay, until the rest is within the budget."""
        others = self._staying - {beside}
        excess = sum(self._sizes[other] for other in others) - self._budget
        order: Sequence[int] = self._orders.followed or ()
        going = []
        for other in sorted(others, key=lambda other: other in order):
            if excess <= 0:
                break
            excess -= self._sizes[other]
            self._staying.discard(other)
            going.append(other)
        return going
