# SPDX-License-Identifier: Apache-2.0
"""The memory of an accelerator, and copies into it on a stream of their own.

Work is queued here and not waited for. A *mark* is a point in the queue of a stream; it is over when all that
was queued before it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

Mark = Any


class Device(Protocol):
    """What layers are copied to. *The current stream* is the one that computes."""

    def allocate(self, size: int) -> Tensor:
        """Return ``size`` bytes (at least one) that the current stream may use from now on."""

    def mark(self) -> Mark:
        """Mark the current stream."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark) -> tuple[Mark, Mark]:
        """Copy (to, from) from host memory when ``after`` is over, and after earlier copies.

        Returns the marks of the copy's beginning and end. All memory must stay until the end is over.
        """

    def wait(self, mark: Mark, on: Mark | None = None) -> None:
        """What is queued from now on waits for a mark; the caller does not.

        It is queued on the current stream, or on the stream of another mark.
        """

    def is_over(self, mark: Mark) -> bool:
        """Tell whether a mark is over, without waiting."""

    def finish(self, mark: Mark) -> None:
        """Wait until a mark is over."""

    def times(self, marks: Sequence[Mark]) -> list[int]:
        """Return when these marks, which are over, were: ``time.monotonic_ns()``."""


class _StreamMark(NamedTuple):
    event: Any
    stream: Any


class AcceleratorDevice:
    """A device of torch that has streams and events, such as a CUDA GPU.

    Memory is from torch's allocator and belongs to the current stream, so that it is used again in that
    stream's order and never while autograd holds a view of it.
    """

    _TIMES_AFTER: Final = 60_000_000_000
    """Nanoseconds after which clocks are compared anew: events tell their distance in 32-bit milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._copies = self._module.Stream(device)
        self._compare_clocks()

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def mark(self) -> _StreamMark:
        return self._mark(self._module.current_stream(self._device))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark) -> tuple[Mark, Mark]:
        try:
            with self._module.stream(self._copies):
                self._copies.wait_event(after.event)
                start = self._mark(self._copies)
                for to, source in pairs:
                    to.copy_(source, non_blocking=True)
                return start, self._mark(self._copies)
        except BaseException:  # such as Ctrl-C: the caller lets go of memory that is being copied
            self._copies.synchronize()
            raise

    def wait(self, mark: Mark, on: Mark | None = None) -> None:
        stream = self._module.current_stream(self._device) if on is None else on.stream
        stream.wait_event(mark.event)

    def is_over(self, mark: Mark) -> bool:
        return bool(mark.event.query())

    def finish(self, mark: Mark) -> None:
        mark.event.synchronize()

    def times(self, marks: Sequence[Mark]) -> list[int]:
        since = self._compared.event.elapsed_time
        times = [self._compared_at + round(1e6 * since(mark.event)) for mark in marks]
        if time.monotonic_ns() - self._compared_at > self._TIMES_AFTER:
            self._compare_clocks()
        return times

    def _mark(self, stream: Any) -> _StreamMark:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return _StreamMark(event, stream)

    def _compare_clocks(self) -> None:
        self._compared = self._mark(self._copies)
        self._compared.event.synchronize()
        self._compared_at = time.monotonic_ns()
