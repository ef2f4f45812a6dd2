# SPDX-License-Identifier: Apache-2.0
"""A device whose copies happen as late as they may, in memory that shows what was not waited for.

It stands for a GPU where there is none. What computes runs at once, on the CPU; a copy is only queued, and
made when somebody waits for it. So whoever uses a layer without waiting finds NaNs, and who gives host
memory back, or writes into it, before a copy is over sends something else. With ``eager`` copies are made
when they are queued, which is the other end of what a GPU may do. With ``lag`` nothing is known to be over
before so many marks were made after it, as with a GPU that is that far behind the host.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_NAN = 0xFF
"""A byte that makes NaN of any floating point number that consists of it."""


@dataclass(eq=False)
class LazyMark:
    """A point in a stream."""

    number: int
    over_at: int | None = None


class _Copy(NamedTuple):
    moves: Sequence[tuple[int, int, int]]
    """Of each tensor: address on the device, address in the host's memory, bytes."""
    blocks: frozenset[int]
    start: LazyMark
    end: LazyMark


class LazyDevice:
    """Streams of a device, and the bytes that it holds."""

    def __init__(self, *, eager: bool = False, lag: int = 0) -> None:
        self._eager, self._lag = eager, lag
        self._caught_up = 0
        self._queue: list[_Copy] = []
        self._marks = 0
        self._allocated_after: dict[int, int] = {}  # by address: the latest mark then
        self._lost: set[int] = set()
        self.live = 0
        self.peak = 0
        self.finished: list[LazyMark] = []
        """What somebody waited for on the host."""
        self.before_copy: Callable[[], None] = lambda: None

    def allocate(self, size: int) -> Tensor:
        memory = np.full(size, _NAN, dtype=np.uint8)
        block = torch.from_numpy(memory)
        self.live += size
        self.peak = max(self.peak, self.live)
        self._allocated_after[block.data_ptr()] = self._marks
        weakref.finalize(memory, self._freed, block.data_ptr(), size).atexit = False
        return block

    def _freed(self, address: int, size: int) -> None:
        self.live -= size
        if any(address in copy.blocks for copy in self._queue):
            self._lost.add(address)

    def mark(self) -> LazyMark:
        return self._mark(time.monotonic_ns())

    def _mark(self, over_at: int | None) -> LazyMark:
        self._marks += 1
        return LazyMark(self._marks, over_at)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: LazyMark) -> tuple[LazyMark, LazyMark]:
        self.before_copy()
        for to, source in pairs:
            assert (to.dtype, to.shape) == (source.dtype, source.shape)
            assert source.is_contiguous()
            since = self._allocated_after[to.untyped_storage().data_ptr()]
            assert after.number > since, "the memory may still be in use when the copy begins"
        # Only addresses are kept, as in the queue of a GPU.
        moves = [(to.data_ptr(), source.data_ptr(), to.nbytes) for to, source in pairs]
        blocks = frozenset(to.untyped_storage().data_ptr() for to, _ in pairs)
        copy = _Copy(moves, blocks, self._mark(None), self._mark(None))
        self._queue.append(copy)
        if self._eager:
            self._run_to(copy.end)
        return copy.start, copy.end

    def wait(self, mark: LazyMark, on: LazyMark | None = None) -> None:
        self._run_to(mark)

    def is_over(self, mark: LazyMark) -> bool:
        known = mark.number <= max(self._caught_up, self._marks - self._lag)
        return known and mark.over_at is not None

    def finish(self, mark: LazyMark) -> None:
        self.finished.append(mark)
        self._run_to(mark)
        self._caught_up = max(self._caught_up, mark.number)

    def times(self, marks: Sequence[LazyMark]) -> list[int]:
        times = [mark.over_at for mark in marks]
        assert None not in times
        return [over_at for over_at in times if over_at is not None]

    def _run_to(self, mark: LazyMark) -> None:
        while self._queue and mark.over_at is None:
            copy = self._queue.pop(0)
            assert not copy.blocks & self._lost, "a copy into memory that was given back before it was over"
            copy.start.over_at = time.monotonic_ns()
            for move in copy.moves:
                ctypes.memmove(*move)
            copy.end.over_at = time.monotonic_ns()
        assert mark.over_at is not None, "a mark of another device"
