# SPDX-License-Identifier: Apache-2.0
"""Where gpu_streaming.py runs its checks: on a GPU, or in a rehearsal on the CPU with a stand-in for one."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from peftds_ext import _native
from peftds_ext.stream.device import AcceleratorDevice, Device, Mark


class Place(Protocol):
    """All that the checks ask of a device."""

    device: torch.device
    """Where models are."""
    judged: bool
    """Whether times mean anything."""
    rounding: int
    """Bytes by which memory that a stream takes may be rounded up."""

    def copies(self) -> Device:
        """Make what copies layers."""

    def page_lock(self) -> object | None:
        """Return how host memory is locked."""

    def pinned(self, size: int) -> Tensor:
        """Return bytes in page-locked memory of torch's own."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Tell whether torch takes a tensor's memory for page-locked."""

    def wait(self) -> None:
        """Wait until the device has nothing to do."""

    def begin_peak(self) -> None:
        """Measure :meth:`peak` from now on."""

    def peak(self, kept: int) -> int:
        """Return the most bytes that were in use; ``kept``: weights that the model has for good."""

    def forbid_waits(self) -> AbstractContextManager[None]:
        """Let what waits for the device raise an exception."""


def seconds(place: Place, action: Callable[[], object]) -> float:
    """Return how long an action and the device's part of it take."""
    place.wait()
    start = time.perf_counter()
    action()
    place.wait()
    return time.perf_counter() - start


class Gpu:
    """The first CUDA device."""

    judged = True
    rounding = 2 << 20

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)

    def copies(self) -> Device:
        return AcceleratorDevice(self.device)

    def page_lock(self) -> object | None:
        return _native.cuda_page_lock()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def begin_peak(self) -> None:
        self.wait()
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self, kept: int) -> int:
        self.wait()
        return torch.cuda.max_memory_allocated(self.device)

    @contextlib.contextmanager
    def forbid_waits(self) -> Iterator[None]:
        self.wait()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Waitable(Device, Protocol):
    """A stand-in for a device that tells what it has seen."""

    live: int
    peak: int
    finished: list[Mark]


class StandIn:
    """The CPU, with layers copied by a stand-in for a GPU."""

    judged = False
    rounding = 0

    def __init__(self, make: Callable[[], Waitable]) -> None:
        self.device = torch.device("cpu")
        self._make = make
        self._latest: Waitable | None = None

    def copies(self) -> Device:
        self._latest = self._make()
        return self._latest

    def page_lock(self) -> object | None:
        lock: object = _native.core().mlock_page_lock()
        return lock

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def is_pinned(self, tensor: Tensor) -> bool:
        return True  # torch knows of no such memory without a GPU

    def wait(self) -> None:
        pass

    def begin_peak(self) -> None:
        if self._latest is not None:
            self._latest.peak = self._latest.live

    def peak(self, kept: int) -> int:
        return kept + (0 if self._latest is None else self._latest.peak)

    @contextlib.contextmanager
    def forbid_waits(self) -> Iterator[None]:
        before = 0 if self._latest is None else len(self._latest.finished)
        yield
        if self._latest is not None and len(self._latest.finished) > before:
            raise RuntimeError("the host waited for a copy")
