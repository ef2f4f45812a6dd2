# SPDX-License-Identifier: Apache-2.0
"""Tensors by key, wherever their bytes lie: in a swap file of our own, or in place in somebody else's file.

What lies in place is only read. When it is given other bytes it moves to the swap file, once.
"""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from peftds_ext import ops
from peftds_ext.store.engine import StorageEngine
from peftds_ext.store.refusals import refused
from peftds_ext.store.swap_file import PendingReads, SwapFile

if TYPE_CHECKING:
    from peftds_ext._native._core import File, Ticket

_PAGE: Final = 4096
_CONVERTED: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, eq=False)
class Source:
    """Where a tensor's elements lie in a file, and what they are in memory."""

    file: File
    offset: int
    """Bytes; a multiple of the size of an element in the file."""
    stored: torch.dtype
    """In the file."""
    dtype: torch.dtype
    """In memory: the same, or both are among fp32, bf16 and fp16."""
    numel: int
    """In the file."""
    room: int
    """Elements in memory, at least ``numel``: a rank's partition may be longer than what is left for it."""
    read_only: bool
    """Whether a change of the file is an error."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.stored.itemsize

    def for_executor(self) -> tuple[File, int, int, int, tuple[str, str] | None, bool]:
        """Return it in the form that the executor takes."""
        cast = None if self.stored is self.dtype else (_name(self.stored), _name(self.dtype))
        room = self.room * self.dtype.itemsize
        return self.file, self.offset, self.nbytes, room, cast, self.read_only


def can_lie_in_place(stored: torch.dtype, dtype: torch.dtype, offset: int) -> str:
    """Return why a tensor of a file cannot be used where it is, or ""."""
    if stored is not dtype and not {stored, dtype} <= _CONVERTED:
        return f"it is {_name(stored)} in the file and {_name(dtype)} in the model"
    if offset % stored.itemsize:
        return "its elements are not aligned in the file"
    return ""


class Records:
    """Tensors by key. Thread-safe, except that one key is not written and read at once."""

    def __init__(self, engine: StorageEngine, make_file: Callable[[], SwapFile]) -> None:
        """Hold nothing yet; ``make_file`` is called once, when the first record is written."""
        self._engine, self._make_file = engine, make_file
        self._in_place: dict[str, Source] = {}
        self._lock = threading.RLock()
        self._made = False

    @functools.cached_property
    def _swap(self) -> SwapFile:
        made = self._make_file()
        self._made = True
        return made

    def make_file(self) -> None:
        """Make the swap file now.

        Raises:
            StorageError: it cannot be made.
        """
        with self._lock:
            _ = self._swap

    def bind(self, key: str, source: Source) -> None:
        """Let a record be what lies in a file that is only read.

        Raises:
            ValueError: :func:`can_lie_in_place` says why not.
        """
        reason = can_lie_in_place(source.stored, source.dtype, source.offset)
        if reason:
            raise ValueError(f"{source.file.path}: record {key!r} cannot be used in place: {reason}")
        self._in_place[key] = source

    @property
    def path(self) -> Path | None:
        """The swap file, if there is one."""
        return self._swap.path if self._made else None

    @property
    def written_bytes(self) -> int:
        """Bytes of the disk that the swap file takes."""
        return self._swap.size if self._made else 0

    def source(self, key: str) -> Source:
        """Return where a record lies now.

        Raises:
            StorageError: its last write failed.
        """
        found = self._in_place.get(key)
        if found is not None:
            return found
        file, offset, dtype, numel = self._swap.place(key)
        return Source(file, offset, dtype, dtype, numel, numel, read_only=False)

    def arrived(self, key: str, tensor: Tensor) -> None:
        """Compare what was read through :meth:`source` with its checksums, where that is due.

        Raises:
            CorruptDataError: other bytes are there than were written.
        """
        if key not in self._in_place:
            self._swap.compare(key, tensor)

    def write(self, key: str, tensor: Tensor) -> None:
        """Give a record new bytes, in the swap file; see :meth:`SwapFile.write`.

        Raises:
            StorageError: the write failed. What lies in place stays what the record is.
        """
        with self._lock:
            swap = self._swap
        swap.write(key, tensor)
        self._in_place.pop(key, None)

    def fetch_all(self, keys: Sequence[str], *, ahead: bool = False) -> PendingRecords:
        """Start reading records, each into new memory of the engine's arena.

        Raises:
            StorageError: the last write of one of them failed.
        """
        in_place = [key for key in keys if key in self._in_place]
        swapped = [key for key in keys if key not in self._in_place]
        sources = [self._in_place[key] for key in in_place]
        pages = [_Pages(source, self._engine) for source in sources]
        pieces: dict[File, list[tuple[int, Tensor]]] = {}
        for source, page in zip(sources, pages, strict=True):
            pieces.setdefault(source.file, []).append((page.offset, page.memory))
        tickets = [self._engine.read(file, parts, ahead=ahead) for file, parts in pieces.items()]
        reads = self._swap.fetch_all(swapped, ahead=ahead) if swapped else None
        return PendingRecords(keys, dict(zip(in_place, pages, strict=True)), tickets, swapped, reads)

    def fetch(self, key: str) -> Tensor:
        """Read one record.

        Raises:
            StorageError: the read failed (CorruptDataError: other bytes are there than should be).
        """
        return self.fetch_all([key]).wait()[0]

    def read_into(self, key: str, destination: Tensor) -> None:
        """Read a record into memory of the caller's, contiguous and of the record's dtype and size.

        Raises:
            StorageError: the read failed (CorruptDataError: other bytes are there than should be).
        """
        if key in self._in_place:
            destination.copy_(self.fetch(key))
        else:
            self._swap.read_into(key, destination)

    def mapped(self, key: str) -> Tensor:
        """Return a record as a tensor that takes no memory where its bytes can be used as they are.

        What is written into the tensor stays in memory, and the file as it was.

        Raises:
            StorageError: it cannot be read (CorruptDataError: other bytes are there than should be).
        """
        source = self._in_place.get(key)
        if source is None:
            return self._swap.mapped(key)
        source.file.check_unchanged()
        if source.stored is not source.dtype or source.room != source.numel or not source.numel:
            return self.fetch(key)
        before = source.offset % mmap.ALLOCATIONGRANULARITY
        try:
            mapping = mmap.mmap(
                source.file.descriptor,
                before + source.nbytes,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=source.offset - before,
            )
        except OSError as error:
            what = f"mapping {source.nbytes} bytes at {source.offset}"
            raise refused(error, what, Path(source.file.path)) from error
        return torch.frombuffer(mapping, dtype=source.dtype, offset=before)

    def holds(self, key: str, tensor: Tensor) -> bool:
        """Tell whether a record is bit for bit this tensor."""
        if key not in self._in_place:
            return self._made and self._swap.holds(key, tensor)
        source, flat = self._in_place[key], tensor.detach().reshape(-1)
        if (flat.dtype, flat.numel()) != (source.dtype, source.room):
            return False
        theirs = self.fetch(key)[: source.numel]  # what follows is of no partition
        return torch.equal(flat[: source.numel].view(torch.uint8), theirs.view(torch.uint8))

    def close(self) -> None:
        """End the engine, and remove the swap file's folder. Idempotent."""
        if self._made:
            self._swap.close()
        else:
            self._engine.close()


class _Pages:
    """The whole pages around a source, as far as its file goes, in memory."""

    def __init__(self, source: Source, engine: StorageEngine) -> None:
        self.source, self._engine = source, engine
        self.offset = source.offset // _PAGE * _PAGE
        end = source.offset + source.nbytes
        self.end = max(end, min(-(-end // _PAGE) * _PAGE, source.file.size()))
        self.memory = engine.empty(max(1, self.end - self.offset), torch.uint8)
        if end == self.offset:  # a page's memory, and nothing to read
            self.memory = self.memory[:0]

    def tensor(self) -> Tensor:
        """Return the elements, of the dtype and the number that memory has, after the read."""
        source = self.source
        source.file.check_unchanged()
        before = source.offset - self.offset
        stored = self.memory[before : before + source.nbytes].view(source.stored)
        if source.stored is source.dtype and source.room == source.numel:
            return stored
        tensor = self._engine.empty(source.room, source.dtype)
        tensor[source.numel :].zero_()
        _convert(stored, tensor[: source.numel])
        return tensor


class PendingRecords:
    """Records on their way into memory."""

    def __init__(
        self,
        keys: Sequence[str],
        pages: dict[str, _Pages],
        tickets: Sequence[Ticket],
        swapped: Sequence[str],
        reads: PendingReads | None,
    ) -> None:
        self._keys, self._pages, self._tickets = keys, pages, tickets
        self._swapped, self._reads = swapped, reads

    def wait(self) -> list[Tensor]:
        """Wait for the bytes and return them in the order of the keys.

        Raises:
            StorageError: a read failed (CorruptDataError: other bytes are there than should be).
        """
        for ticket in self._tickets:
            ticket.wait()
        found = {}
        for key in list(self._pages):
            found[key] = self._pages.pop(key).tensor()  # what was converted goes before the next one comes
        if self._reads is not None:
            found |= zip(self._swapped, self._reads.wait(), strict=True)
        return [found[key] for key in self._keys]


def _convert(stored: Tensor, target: Tensor) -> None:
    if stored.dtype is target.dtype:
        target.copy_(stored)
    else:
        ops.cast_into(stored, target)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
