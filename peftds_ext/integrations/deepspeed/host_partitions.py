# SPDX-License-Identifier: Apache-2.0
"""Frozen ZeRO-3 partitions in host memory, from which layers are copied to a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from peftds_ext import _native
from peftds_ext.stream.host import ReadLayers

_ALIGNMENT: Final = 64
"""Bytes between which partitions begin in a layer's memory: a cache line."""


class HostPartitions:
    """By layer, partitions that lie in memory, and others that are read there."""

    def __init__(
        self,
        layers: Sequence[Sequence[Any]],
        reads: ReadLayers | None,
        is_read: Callable[[Any], bool],
        page_lock: object | None,
    ) -> None:
        """Give out the partitions of ``layers``; those that ``is_read`` come from ``reads``, in their order.

        With ``page_lock`` the others move to page-locked memory of their exact size, layer by layer.
        """
        self._layers, self._reads = layers, reads
        self._is_read = [[is_read(parameter) for parameter in parameters] for parameters in layers]
        self.arena: Any = None
        """The memory that partitions were moved to; None where they stay."""
        if page_lock is not None:
            self._move(_native.core().Arena(page_lock))

    def shapes(self, layer: int) -> Sequence[tuple[int, torch.dtype]]:
        """Return the elements and the dtype of each partition of a layer."""
        read = iter(self._reads.shapes(layer) if self._reads is not None else ())
        return [
            next(read) if is_read else (parameter.ds_tensor.numel(), parameter.ds_tensor.dtype)
            for parameter, is_read in self._each(layer)
        ]

    def is_ready(self, layer: int) -> bool:
        """Tell whether nothing of a layer has to be waited for."""
        return self._reads is None or not any(self._is_read[layer]) or self._reads.is_ready(layer)

    def make_room(self, layer: int) -> None:
        """Let those go that do not stay beside a layer that is about to be fetched."""
        if self._reads is not None:
            self._reads.make_room(layer)

    def is_transient(self, layer: int) -> bool:
        """Tell whether the memory of a layer that was fetched is given back when nobody refers to it."""
        return self._reads is not None and any(self._is_read[layer]) and self._reads.is_transient(layer)

    def fetch(self, layer: int) -> Sequence[Tensor]:
        """Return a layer's partitions, and start to read those of the next ones.

        Raises:
            StorageError: a read failed.
        """
        read = iter(self._reads.fetch(layer) if self._reads is not None else ())
        return [
            next(read) if is_read else parameter.ds_tensor.data.view(-1)
            for parameter, is_read in self._each(layer)
        ]

    def begin_pass(self, expected: Sequence[int]) -> None:
        """The model's forward begins, in which these layers are going to be fetched, if nothing changes."""
        if self._reads is not None:
            self._reads.begin_pass(expected)

    def rest(self) -> None:
        """Nothing is fetched until the next pass."""
        if self._reads is not None:
            self._reads.rest()

    def close(self) -> None:
        """End the reading. Idempotent."""
        if self._reads is not None:
            self._reads.close()

    def _each(self, layer: int) -> Sequence[tuple[Any, bool]]:
        return list(zip(self._layers[layer], self._is_read[layer], strict=True))

    def _move(self, arena: Any) -> None:
        """Let partitions in memory lie in an arena. DeepSpeed's own memory goes back when nobody has it."""
        self.arena = arena
        moved: set[int] = set()
        for layer in range(len(self._layers)):
            staying = [p for p, is_read in self._each(layer) if not is_read and p.ds_id not in moved]
            moved.update(parameter.ds_id for parameter in staying)
            self._move_layer(arena, [p.ds_tensor for p in staying if p.ds_tensor.numel()])

    @staticmethod
    def _move_layer(arena: Any, partitions: Sequence[Any]) -> None:
        sizes = [-(-partition.nbytes // _ALIGNMENT) * _ALIGNMENT for partition in partitions]
        if not sizes:
            return
        memory = arena.allocate(sum(sizes))
        offsets = itertools.accumulate(sizes, initial=0)
        with torch.inference_mode(False), torch.no_grad():
            for partition, offset in zip(partitions, offsets, strict=False):
                # Each has a storage of its own, since torch.save() writes whole storages.
                place = torch.frombuffer(
                    memory, dtype=partition.dtype, count=partition.numel(), offset=offset
                )
                partition.data = place.copy_(partition)
        _give_back_pinned_memory()


def _give_back_pinned_memory() -> None:
    """Let torch give back the page-locked memory that nobody uses; it keeps it, in sizes of powers of two."""
    if torch.cuda.is_available():
        torch._C._host_emptyCache()
