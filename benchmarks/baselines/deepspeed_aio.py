# SPDX-License-Identifier: Apache-2.0
"""Stock DeepSpeed's ``aio_handle`` (libaio) at the fastest of its settings, with memory it has locked."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import system_calls
import torch
from interleave import Contender, Phases, race
from storage import BLOCK, DEPTH, DIRECTIONS, Storage, accounted, check_round_trip
from torch import Tensor

from baselines.deepspeed_build import async_io_op, require_direct, require_lockable

SWEEP = tuple(itertools.product((False, True), (False, True), (1, 2, 4)))
"""``single_submit``, ``overlap_events``, ``intra_op_parallelism``: the settings that are tried. The last is a
number of threads, of which each has transfers of the whole depth in flight."""
SWEEP_BYTES = 128 * BLOCK
SWEEP_ROUNDS = 3


class AioError(RuntimeError):
    """``aio_handle`` did not do what it was asked to."""


def _move(handle: Any, memory: Tensor, path: Path, direction: str, size: int) -> None:
    call = handle.sync_pread if direction == "read" else handle.sync_pwrite
    operations = call(memory[:size], str(path), 0)
    if operations != 1:
        raise AioError(f"aio_handle's {direction} of {size} bytes at {path} returned {operations}, not 1")


class AioHandle:
    """One handle, one file, and memory that the handle has locked.

    Raises:
        NotMeasured: DeepSpeed or its op are missing, or the machine does not let it work.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._module = async_io_op()
        require_lockable(storage.size)
        self.name = name
        self._path = storage.make_file(name)
        require_direct(self._path)
        self._owner = self._module.aio_handle(BLOCK, DEPTH)
        self._memory = self._owner.new_cpu_locked_tensor(storage.size, torch.empty(0, dtype=torch.uint8))
        self._memory.zero_()
        settings = self._fastest(min(storage.size, SWEEP_BYTES))
        self._handle = self._module.aio_handle(BLOCK, DEPTH, *settings)
        words = "single_submit={}, overlap_events={}, intra_op_parallelism={}".format(*settings)
        self.notes = [f"{name}: {words} is the fastest of {len(SWEEP)} settings"]

    def transfer(self, direction: str, size: int) -> Phases:
        return accounted(lambda: self._go(direction, size))

    def system_calls(self, direction: str, size: int) -> int:
        return system_calls.of_this_process(lambda: self._go(direction, size))

    def check(self) -> Iterator[str]:
        check_round_trip(self.name, self._path, self._memory, self._go)
        yield f"same work: {self.name} writes and reads back every block"

    def close(self) -> None:
        """Free the memory before the handles, and all before the interpreter ends."""
        self._owner.free_cpu_locked_tensor(self._memory)
        del self._memory, self._handle, self._owner
        gc.collect()

    def _go(self, direction: str, size: int) -> None:
        _move(self._handle, self._memory, self._path, direction, size)

    def _fastest(self, size: int) -> tuple[bool, bool, int]:
        """Return the settings with the least median time of reading and writing ``size`` bytes."""

        def contender(index: int, settings: tuple[bool, bool, int]) -> Contender:
            handle = self._module.aio_handle(BLOCK, DEPTH, *settings)

            def run() -> Phases:
                phases: Phases = {}
                for direction in DIRECTIONS:
                    move = functools.partial(_move, handle, self._memory, self._path, direction, size)
                    phases[direction] = accounted(move)["transfer"]
                return phases

            return Contender(str(index), run)

        contenders = [contender(index, settings) for index, settings in enumerate(SWEEP)]
        samples = race(contenders, rounds=SWEEP_ROUNDS, warmup_rounds=1, settle_s=0.0)
        return SWEEP[min(range(len(SWEEP)), key=lambda index: samples.median(str(index), DIRECTIONS))]
