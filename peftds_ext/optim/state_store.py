# SPDX-License-Identifier: Apache-2.0
"""Where Adam's states live: in host memory, or in a file through which chunks are pipelined.

A group is the flat run of parameters that is stepped at once. Its states are cut into chunks, and a chunk is
what is read, computed on and written in one piece.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from peftds_ext import _native
from peftds_ext.optim.state_format import StateFormat, slice_arrays
from peftds_ext.store.engine import StorageEngine
from peftds_ext.store.folder import StoreFolder
from peftds_ext.store.refusals import refused
from peftds_ext.store.swap_file import PendingReads, PendingWrite, SwapFile

_CHUNK_BYTES: Final = 16 << 20
_CHUNK_STEP: Final = 1 << 16
"""Chunks are a multiple of this many elements, so that blocks and vectors do not cross their borders."""

_PAGE: Final = 4096
_AHEAD: Final = 2
_BEHIND: Final = 2
"""Chunks that are read before, and written after, the one that is computed on."""


@dataclass(frozen=True, eq=False)
class StateGroup:
    """One group's states, wherever they are."""

    name: str
    numel: int
    format: StateFormat


@dataclass(frozen=True)
class Traffic:
    """What a store has transferred so far, and how long that was waited for."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited_seconds: float = 0.0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.read_bytes - earlier.read_bytes,
            self.written_bytes - earlier.written_bytes,
            self.waited_seconds - earlier.waited_seconds,
        )


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of a group's states that is in memory now."""

    group: StateGroup
    start: int
    stop: int
    arrays: dict[str, Tensor]
    """By name, as :meth:`StateFormat.arrays` has them, of elements ``start`` to ``stop`` of the group."""


class StateStore(Protocol):
    """What keeps groups."""

    def add(self, group: StateGroup) -> None:
        """Take the room that a group needs. Its content is undefined until it is written.

        Raises:
            StorageFullError: there is no room.
        """

    def chunk_count(self, group: StateGroup) -> int:
        """Return how many chunks :meth:`sweep` yields for a group."""

    def sweep(
        self,
        groups: Sequence[StateGroup],
        *,
        read: bool = True,
        write: bool = True,
        within: range | None = None,
    ) -> Iterator[Chunk]:
        """Yield the chunks of groups in order. Nothing else may be done with these groups meanwhile.

        With ``read`` the arrays hold what is stored, else anything. With ``write`` what they hold when the
        next chunk is asked for is stored; it is over when the iterator is exhausted. With ``within`` only
        chunks that have one of these elements are visited.

        Raises:
            StorageError: a transfer failed; what is stored of the chunk concerned is undefined after a write.
        """

    def scratch(self, numel: int) -> Tensor:
        """Return fp32 memory of any content for ``numel`` elements, as plentiful as the states themselves.

        Raises:
            StorageFullError: there is no room.
        """

    def usage(self) -> dict[str, int]:
        """Return the bytes of states in ``"memory"`` and on ``"disk"``."""

    def traffic(self) -> Traffic:
        """Return what was transferred so far."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class MemoryStore:
    """States in host memory."""

    def __init__(self) -> None:
        self._arena = _native.core().Arena()
        self._arrays: dict[StateGroup, dict[str, Tensor]] = {}

    def add(self, group: StateGroup) -> None:
        nbytes = group.format.nbytes(group.numel)
        memory = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            memory = torch.frombuffer(self._arena.allocate(nbytes), dtype=torch.uint8)
        self._arrays[group] = group.format.carve(memory, group.numel)

    def chunk_count(self, group: StateGroup) -> int:
        return len(_parts(group))

    def sweep(
        self,
        groups: Sequence[StateGroup],
        *,
        read: bool = True,
        write: bool = True,
        within: range | None = None,
    ) -> Iterator[Chunk]:
        for group in groups:
            for part in _parts(group):
                if _overlap(part, within):
                    arrays = slice_arrays(self._arrays[group], part)
                    yield Chunk(group, part.start, part.stop, arrays)

    def scratch(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=torch.float32)

    def usage(self) -> dict[str, int]:
        nbytes = sum(array.nbytes for arrays in self._arrays.values() for array in arrays.values())
        return {"memory": nbytes, "disk": 0}

    def traffic(self) -> Traffic:
        return Traffic()

    def close(self) -> None:
        self._arrays.clear()


class FileStore:
    """States in one file, chunk after chunk; memory holds a few chunks while they are swept through."""

    def __init__(self, folder: StoreFolder, engine: StorageEngine, *, rank: int, world_size: int) -> None:
        """Make the file in ``folder``.

        Raises:
            StorageError: it cannot be made.
        """
        self._folder, self._engine = folder, engine
        # In one queue reads and writes would come in turns of a chunk each, and one direction would rest.
        writer = StorageEngine(engine.settings)
        self._file = SwapFile(folder, engine, rank=rank, world_size=world_size, writer=writer, volatile=True)
        self._read_bytes = self._written_bytes = 0
        self._waited_seconds = 0.0

    @property
    def file(self) -> SwapFile:
        """Where the states are."""
        return self._file

    def add(self, group: StateGroup) -> None:
        for part in _parts(group):
            self._file.reserve(_key(group, part), torch.uint8, _room(group, part))

    def chunk_count(self, group: StateGroup) -> int:
        return len(_parts(group))

    def sweep(
        self,
        groups: Sequence[StateGroup],
        *,
        read: bool = True,
        write: bool = True,
        within: range | None = None,
    ) -> Iterator[Chunk]:
        todo = deque((group, part) for group in groups for part in _parts(group) if _overlap(part, within))
        coming: deque[_Transfer] = deque()
        going: deque[PendingWrite] = deque()
        try:
            while todo or coming:
                while todo and len(coming) <= _AHEAD:
                    coming.append(self._start(*todo.popleft(), read=read))
                transfer = coming.popleft()
                if transfer.reads is not None:
                    self._wait(transfer.reads)
                    self._read_bytes += transfer.memory.nbytes
                yield transfer.chunk()
                if write:
                    going.append(self._file.start_write(transfer.key, transfer.memory))
                    self._written_bytes += transfer.memory.nbytes
                while len(going) > _BEHIND:
                    self._wait(going.popleft())
            while going:
                self._wait(going.popleft())
        finally:  # after a failure: what is under way ends before its memory goes
            for write_under_way in going:
                with contextlib.suppress(Exception):
                    write_under_way.wait()

    def _start(self, group: StateGroup, part: range, *, read: bool) -> _Transfer:
        key = _key(group, part)
        memory = self._engine.empty(_room(group, part), torch.uint8)
        return _Transfer(group, part, key, memory, self._file.start_read(key, memory) if read else None)

    def scratch(self, numel: int) -> Tensor:
        """Return memory behind which is a file without a name, so that the system can put it on the disk."""
        if not numel:
            return torch.empty(0)
        path = self._folder.path
        try:
            with tempfile.TemporaryFile(dir=path) as file:
                os.posix_fallocate(file.fileno(), 0, 4 * numel)
                mapping = mmap.mmap(file.fileno(), 4 * numel)
        except OSError as error:
            raise refused(error, f"taking {4 * numel} bytes for fp32 states in a checkpoint", path) from error
        return torch.frombuffer(mapping, dtype=torch.float32)

    def usage(self) -> dict[str, int]:
        return {"memory": 0, "disk": self._file.size}

    def traffic(self) -> Traffic:
        return Traffic(self._read_bytes, self._written_bytes, self._waited_seconds)

    def _wait(self, pending: PendingReads | PendingWrite) -> None:
        began = time.monotonic()
        pending.wait()
        self._waited_seconds += time.monotonic() - began

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, eq=False)
class _Transfer:
    """A chunk on its way."""

    group: StateGroup
    part: range
    key: str
    memory: Tensor
    reads: PendingReads | None

    def chunk(self) -> Chunk:
        arrays = self.group.format.carve(self.memory, len(self.part))
        return Chunk(self.group, self.part.start, self.part.stop, arrays)


def _parts(group: StateGroup) -> list[range]:
    """Cut a group into chunks of nearly the same bytes whatever its format."""
    per_step = group.format.nbytes(_CHUNK_STEP)
    size = max(1, _CHUNK_BYTES // per_step) * _CHUNK_STEP
    return [range(start, min(start + size, group.numel)) for start in range(0, group.numel, size)]


def _room(group: StateGroup, part: range) -> int:
    """Bytes of a chunk on the disk: whole pages, so that the transfer needs no copy."""
    return -(-group.format.nbytes(len(part)) // _PAGE) * _PAGE


def _overlap(part: range, within: range | None) -> bool:
    return within is None or (part.start < within.stop and within.start < part.stop)


def _key(group: StateGroup, part: range) -> str:
    return f"{group.name}[{part.start}:{part.stop}]"
