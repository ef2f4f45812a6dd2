# SPDX-License-Identifier: Apache-2.0
"""Layers in, layers out: records the order of use, plans it, and has the executor read ahead along the plan.

It knows layers by number and tensors by their sources, and nothing of who owns the parameters: the owner
says which layer is used, whether its tensors are in memory already, and lets go what it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftds_ext import _native
from peftds_ext.store.engine import StorageEngine
from peftds_ext.store.records import Source
from peftds_ext.stream.plan import Orders
from peftds_ext.stream.schedule import PlannedUse, plan_transfers

if TYPE_CHECKING:
    from peftds_ext._native._core import Executor


class Pipeline:
    """The layers of one model. Used by one thread at a time."""

    def __init__(
        self, engine: StorageEngine, sources: Callable[[int], Sequence[Source]], layers: int, budget: int
    ) -> None:
        """Stream ``layers`` layers; ``sources`` tells what each has on the disk, none if it is all in memory;
        no tensor of them is empty in memory.

        ``budget`` is how many bytes of layers may be in memory beside the one that is in use and the next
        one that is read.
        """
        self._engine, self._sources = engine, sources
        self._executor: Executor = _native.core().Executor(
            engine.native, engine.arena, torch.get_num_threads()
        )
        self._budget = budget
        # What most models do. A wrong guess costs one layer that is read in vain.
        self._orders = Orders([*range(layers), *reversed(range(layers))])
        self._undefined = set(range(layers))
        self._tensors: list[list[tuple[int, Source]]] = [[] for _ in range(layers)]  # offset in the block
        self._sizes = [0] * layers
        self._staged = [0] * layers
        self._plans: dict[tuple[int, ...], tuple[PlannedUse, ...]] = {}
        self._plan: tuple[PlannedUse, ...] | None = None
        self._staying: set[int] = set()
        self._for_the_next: int | None = None  # the layer that stays since it is used again at once
        self._latest = -1
        self.uses = 0
        """Uses of layers that have something on the disk."""
        self.resident_uses = 0
        """Those of them that found everything in memory."""

    @property
    def executor(self) -> Executor:
        """The executor, for its counts and events."""
        return self._executor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes in memory by layer, whole pages; 0 for what need not be read."""
        return tuple(self._sizes)

    @property
    def read_sizes(self) -> tuple[int, ...]:
        """Bytes in memory by layer while it is read: with what is converted, before and after."""
        return tuple(map(sum, zip(self._sizes, self._staged, strict=True)))

    @property
    def records(self) -> int:
        """Passes whose order was new."""
        return self._orders.records

    # -- uses -------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The model's forward begins."""
        self._orders.begin()

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

    def enter(self, layer: int, *, resident: bool) -> list[Tensor]:
        """The use of a layer begins; reads the next ones ahead.

        Returns the layer's tensors, in the order of its sources and in memory of their own, unless it is
        ``resident``.

        Raises:
            StorageError: a read failed (CorruptDataError: a file was changed or cut).
        """
        self._orders.use(layer)
        self._staying.discard(layer)
        self._latest = layer
        self._define()
        self._follow()
        if not self._tensors[layer]:
            self._advance()
            return []
        self.uses += 1
        if resident:
            self.resident_uses += 1
            self._advance(resident=layer)
            return []
        self._advance(demanded=layer)
        block = self._executor.take(layer)
        with torch.inference_mode(False):  # what is read in inference may stay for training
            return [
                torch.frombuffer(block, dtype=source.dtype, count=source.room, offset=offset)
                for offset, source in self._tensors[layer]
            ]

    def rest(self) -> None:
        """No layer is in use until the next one is, which may be long: read that one ahead as well."""
        if self._plan is not None:
            coming = self._orders.position % len(self._plan)
            planned = self._plan[coming].staying | {self._plan[coming].layer}
            self._executor.advance(coming, most=self._most(planned), between=True)

    def _advance(self, *, demanded: int = -1, resident: int = -1) -> None:
        """Let the executor read ahead along the plan."""
        position, most = None, 0
        if self._plan is not None:
            position = self._orders.position - 1
            most = self._most(self._plan[position].staying)
        self._executor.advance(position, demanded=demanded, resident=resident, most=most)

    def _most(self, planned: frozenset[int]) -> int:
        """Layers that may be on their way: one where more stays than the plan has counted on."""
        return len(self._sizes) if self._staying <= planned else 1

    def leave(self, layer: int) -> list[int]:
        """The use of a layer has ended; returns the layers that are to be let go."""
        self._for_the_next = None
        if not self._is_kept(layer):
            return [layer, *self._in_excess(beside=self._latest)]
        self._staying.add(layer)
        if self._plan is not None and self._plan[self._orders.position % len(self._plan)].layer == layer:
            self._for_the_next = layer
        return self._in_excess(beside=layer)

    @property
    def staying(self) -> frozenset[int]:
        """The layers that the plan keeps in memory until their next use."""
        return frozenset(self._staying)

    def changed(self, layer: int) -> None:
        """What lies on the disk of a layer is other than it was, or elsewhere."""
        self._executor.drop(layer)
        self._undefined.add(layer)

    def close(self) -> None:
        """End the executor, after what is under way. Idempotent."""
        self._executor.close()

    # -- the plan -----------------------------------------------------------------------------------------

    def _define(self) -> None:
        for layer in self._undefined:
            sources = self._sources(layer)
            self._tensors[layer] = []
            size, staged = 0, 0
            if sources:
                size, staged, offsets = self._executor.define(
                    layer, [source.for_executor() for source in sources]
                )
                self._tensors[layer] = list(zip(offsets, sources, strict=True))
            if (size, staged) != (self._sizes[layer], self._staged[layer]):
                self._sizes[layer], self._staged[layer] = size, staged
                self._plans.clear()
                self._plan = None
        self._undefined.clear()

    def _follow(self) -> None:
        """Let the executor follow the plan of the order that this pass agrees with, if there is one."""
        order = self._orders.followed
        plan = None
        if order is not None:
            plan = self._plans.get(order)
            if plan is None:
                known = {known: self._plans[known] for known in self._orders.known if known in self._plans}
                plan = plan_transfers(order, self._sizes, self._budget, self.read_sizes)
                self._plans = {**known, order: plan}
        if plan is not self._plan:
            self._plan = plan
            counted = _counted(plan or ())
            self._executor.follow(
                [
                    (use.layer, use.reads, use.reach, counts)
                    for use, counts in zip(plan or (), counted, strict=True)
                ]
            )

    def _is_kept(self, layer: int) -> bool:
        position = self._orders.position - 1
        if self._plan is None or position < 0 or self._plan[position].layer != layer:
            return False
        return self._plan[position].kept

    def _in_excess(self, beside: int) -> list[int]:
        """Take off layers that another order wanted to stay, until the rest is within the budget."""
        others = self._staying - {beside}
        excess = sum(self._sizes[other] for other in others) - self._budget
        order = self._orders.followed or ()
        going = []
        for other in sorted(others, key=lambda other: other in order):
            if excess <= 0:
                break
            excess -= self._sizes[other]
            self._staying.discard(other)
            going.append(other)
        return going


def _counted(plan: Sequence[PlannedUse]) -> list[bool]:
    """Tell for each use whether what is read for it takes of the budget later on.

    What is used again at once keeps the place of the layer in use, and that is not the budget's.
    """
    counted = [False] * len(plan)
    for use in range(2 * len(plan) - 1, -1, -1):  # twice, since the order repeats
        this, after = plan[use % len(plan)], plan[(use + 1) % len(plan)]
        again = counted[(use + 1) % len(plan)] if after.layer == this.layer else True
        counted[use % len(plan)] = this.kept and again
    return counted
