# SPDX-License-Identifier: Apache-2.0
"""Layers in, layers out: has the executor read layers from files ahead of their use, along a plan.

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
from peftds_ext.stream.follower import PlanFollower
from peftds_ext.stream.schedule import PlannedUse

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
        self._follower = PlanFollower(layers, budget)
        self._undefined = set(range(layers))
        self._tensors: list[list[tuple[int, Source]]] = [[] for _ in range(layers)]  # offset in the block
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
        return self._follower.sizes

    @property
    def read_sizes(self) -> tuple[int, ...]:
        """Bytes in memory by layer while it is read: with what is converted, before and after."""
        return self._follower.sizes_on_the_way

    @property
    def records(self) -> int:
        """Passes whose order was new."""
        return self._follower.records

    @property
    def staying(self) -> frozenset[int]:
        """The layers that the plan keeps in memory until their next use."""
        return self._follower.staying

    def shapes(self, layer: int) -> list[tuple[int, torch.dtype]]:
        """Return the elements and the dtype of each tensor of a layer, as :meth:`enter` returns them."""
        return [(source.room, source.dtype) for source in self._sources(layer)]

    # -- uses -------------------------------------------------------------------------------------------

    def begin_pass(self, expected: Sequence[int] = ()) -> None:
        """The model's forward begins; uses will be those ``expected``, if that is known beforehand."""
        self._follower.begin_pass(expected)

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""
        return self._follower.begins_again(layer)

    def make_room(self, layer: int) -> list[int]:
        """Return the layers that are to be let go before another one's use begins.

        There are such where the pass takes another turn than the plan has counted on.
        """
        return self._follower.make_room(layer)

    def enter(self, layer: int, *, resident: bool) -> list[Tensor]:
        """The use of a layer begins; reads the next ones ahead.

        Returns the layer's tensors, in the order of its sources and in memory of their own, unless it is
        ``resident``.

        Raises:
            StorageError: a read failed (CorruptDataError: a file was changed or cut).
        """
        self._define()
        if self._follower.use(layer):
            self._hand_over(self._follower.plan or ())
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
        plan = self._follower.plan
        if plan is not None:
            coming = self._follower.position % len(plan)
            planned = plan[coming].staying | {plan[coming].layer}
            self._executor.advance(coming, most=self._follower.most(planned), between=True)

    def leave(self, layer: int) -> list[int]:
        """The use of a layer has ended; returns the layers that are to be let go."""
        return self._follower.leave(layer)

    def changed(self, layer: int) -> None:
        """What lies on the disk of a layer is other than it was, or elsewhere."""
        self._executor.drop(layer)
        self._undefined.add(layer)

    def close(self) -> None:
        """End the executor, after what is under way. Idempotent."""
        self._executor.close()

    # -- the executor -----------------------------------------------------------------------------------

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
            self._follower.resize(layer, size, size + staged)
        self._undefined.clear()

    def _hand_over(self, plan: Sequence[PlannedUse]) -> None:
        """Let the executor follow a plan."""
        self._executor.follow(
            [
                (use.layer, use.reads, use.reach, counts)
                for use, counts in zip(plan, _counted(plan), strict=True)
            ]
        )

    def _advance(self, *, demanded: int = -1, resident: int = -1) -> None:
        """Let the executor read ahead along the plan."""
        position, most = None, 0
        if self._follower.plan is not None:
            position = self._follower.position - 1
            most = self._follower.most(self._follower.plan[position].staying)
        self._executor.advance(position, demanded=demanded, resident=resident, most=most)


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
