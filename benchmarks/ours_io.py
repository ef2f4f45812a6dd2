# SPDX-License-Identifier: Apache-2.0
"""Our storage engine, with either of its methods, and the checksums that it can be asked for."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import system_calls
import torch
from interleave import Contender, NotMeasured, Phases
from storage import BLOCK, DEPTH, Storage, accounted, check_round_trip

from peftds_ext import _native
from peftds_ext.errors import PeftdsError


class OurEngine:
    """The engine with ``method`` ("io_uring" or "threads"), a file, and memory of the engine's arena.

    Without ``arena`` the memory is an ordinary mapping. How scattered its pages are decides
    into how many requests the kernel splits a block, and with that the rate of some disks.

    Raises:
        NotMeasured: the method is not to be had here, or the file cannot be used past the page cache.
    """

    def __init__(self, storage: Storage, name: str, method: str, *, arena: bool = True) -> None:
        core = _native.core()
        try:
            self._engine = core.Engine(method=method, queue_depth=DEPTH, block_bytes=BLOCK)
        except PeftdsError as error:
            raise NotMeasured(str(error)) from error
        self.name = name
        self._any_folder = storage.any_folder
        self.notes: list[str] = []
        self._path = storage.make_file(name)
        self._file = core.File(str(self._path), core.Access.UPDATE)
        if not self._file.direct:
            self._accept_buffered()
        self._directions = {"read": core.Direction.READ, "write": core.Direction.WRITE}
        self._engine.attach(self._file)
        mapping = self._engine.make_arena().allocate(storage.size) if arena else ordinary_memory(storage.size)
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.memory.zero_()

    def transfer(self, direction: str, size: int) -> Phases:
        return accounted(lambda: self._move(direction, size))

    def system_calls(self, direction: str, size: int) -> int:
        return system_calls.of_this_process(lambda: self._move(direction, size))

    def check(self) -> Iterator[str]:
        if not self._file.direct and not self._any_folder:
            raise ArithmeticError(f"{self.name} went over to the page cache: {self._file.why_buffered}")
        check_round_trip(self.name, self._path, self.memory, self._move)
        yield f"same work: {self.name} writes and reads back every block"

    def close(self) -> None:
        self._engine.close()

    def _move(self, direction: str, size: int) -> None:
        extent = (self._file, 0, self.memory.data_ptr(), size)
        self._engine.submit(self._directions[direction], [extent], keep_alive=self.memory).wait()

    def _accept_buffered(self) -> None:
        reason = f"{self.name}: transfers are buffered, since {self._file.why_buffered}"
        if not self._any_folder:
            self.close()
            raise NotMeasured(f"{reason}; this would measure the page cache: choose another --io-path")
        self.notes.append(f"{reason}: its rates are those of the page cache")


def ordinary_memory(size: int) -> mmap.mmap:
    """Return private memory in pages of the usual size, as ``malloc`` gives it."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def checksums(name: str, memory: torch.Tensor, threads: int) -> Contender:
    """Return a contender that takes the CRC-32C of each block of ``memory``, as after a read."""
    core, data = _native.core(), memory.numpy()
    return Contender(name, lambda: accounted(lambda: core.crc32c_blocks(data, BLOCK, threads)))
