# SPDX-License-Identifier: Apache-2.0
"""One data file that holds tensors one after another, with checksums and a manifest beside it.

A record is placed, and its space on the disk taken, when it is first written; it keeps its place. Records
begin at multiples of a page, so that their transfers need no copy.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from peftds_ext.errors import CorruptDataError, StorageError, StorageFullError
from peftds_ext.store.engine import StorageEngine, checksums
from peftds_ext.store.folder import StoreFolder
from peftds_ext.store.manifest import MAGIC, MANIFEST_NAME, VERSION, Manifest, Record, write_manifest
from peftds_ext.store.refusals import refused

if TYPE_CHECKING:
    from peftds_ext._native._core import File, Ticket

logger = logging.getLogger("peftds_ext")

_PAGE: Final = 4096
_CHECKSUM_BLOCK: Final = 1 << 20
_COMPARED_AT_ONCE: Final = 8 << 20
_PUBLISH_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0


@dataclass
class _Extent:
    """Where a record lies, and what is known of its bytes."""

    offset: int
    dtype: torch.dtype
    numel: int
    crc32c: list[int]
    compared: bool = False
    """Whether its bytes were read and compared with the checksums since they were written."""
    written: bool = False
    """Whether the last write succeeded."""
    rewritten: bool = False
    """Whether it was written again since the manifest was published last: it may soon be once more."""
    told: bool = False
    """Whether the manifest on the disk has its checksums."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class SwapFile:
    """Tensors on a disk, by key. Thread-safe, except that one key is not written and read at once."""

    def __init__(
        self,
        folder: StoreFolder,
        engine: StorageEngine,
        *,
        rank: int = 0,
        world_size: int = 1,
        writer: StorageEngine | None = None,
        volatile: bool = False,
    ) -> None:
        """Make the data file in ``folder``.

        With ``writer`` writes have an engine of their own, so that they and reads do not stand in one queue.
        With ``volatile`` records are written again and again: the manifest never tells their checksums.

        Raises:
            StorageError: the file cannot be made.
        """
        self._folder, self._engine, self._writer = folder, engine, writer or engine
        self._rank, self._world_size = rank, world_size
        self._volatile = volatile
        self._opened: File | None = engine.create_file(folder.data_path)
        if writer is not None:
            writer.native.attach(self._opened)
        self._extents: dict[str, _Extent] = {}
        self._end = 0
        self._lock = threading.RLock()
        self._manifest = _PublishedManifest()
        self._publish()

    @property
    def path(self) -> Path:
        """The data file."""
        return self._folder.data_path

    @property
    def _file(self) -> File:
        if self._opened is None:
            raise ValueError(f"{self.path}: the swap file is closed")
        return self._opened

    def __contains__(self, key: str) -> bool:
        return key in self._extents

    @property
    def size(self) -> int:
        """Bytes of the disk that the file takes."""
        return self._end

    def write(self, key: str, tensor: Tensor) -> None:
        """Write a tensor; its space is taken at the first time, and dtype and size stay the same.

        Raises:
            StorageFullError: there is no room; what was there before is unharmed.
            StorageError: the write failed. Until it is written again the record cannot be read, since the
                bytes on the disk may be old, new or mixed.
        """
        self.start_write(key, tensor).wait()

    def start_write(self, key: str, tensor: Tensor) -> PendingWrite:
        """Start what :meth:`write` does; the tensor stays as it is until the write is waited for.

        Raises:
            StorageFullError: there is no room; what was there before is unharmed.
        """
        flat = tensor.detach().reshape(-1)
        with self._lock:
            extent = self._extents.get(key) or self._place(key, flat.dtype, flat.numel())
            self._fits(key, extent, flat)
            if extent.told:
                self._publish_if_there_is_room(with_checksums=False)
            if not self._volatile or self._engine.settings.checksum != "off":
                extent.crc32c = checksums(flat, _CHECKSUM_BLOCK)
            extent.compared, extent.rewritten = False, extent.written or self._volatile
            extent.written = False
        return PendingWrite(self, key, self._writer.write(self._file, [(extent.offset, flat)]))

    def reserve(self, key: str, dtype: torch.dtype, numel: int) -> None:
        """Take a record's room on the disk before it is first written.

        Raises:
            StorageFullError: there is no room.
        """
        with self._lock:
            self._place(key, dtype, numel)

    def note_written(self, key: str) -> None:
        """Let a record be read again, since its write succeeded."""
        with self._lock:
            self._extents[key].written = True
            self._manifest.changed |= not self._volatile

    def fetch(self, key: str, *, ahead: bool = False) -> PendingRead:
        """Start reading a record into new memory of the engine's arena.

        Raises:
            StorageError: the last write of this record failed.
        """
        return PendingRead(self.fetch_all([key], ahead=ahead))

    def fetch_all(self, keys: Sequence[str], *, ahead: bool = False) -> PendingReads:
        """Start reading records, each into new memory of the engine's arena, by one submission.

        Raises:
            StorageError: the last write of one of them failed.
        """
        extents = (self._extents[key] for key in keys)
        tensors = [self._engine.empty(extent.numel, extent.dtype) for extent in extents]
        return self._start_read(keys, tensors, ahead)

    def read_into(self, key: str, destination: Tensor) -> None:
        """Read a record into memory of the caller's, contiguous and of the record's dtype and size.

        Raises:
            StorageError: the read failed (CorruptDataError: other bytes are there than were written).
        """
        self.start_read(key, destination).wait()

    def start_read(self, key: str, destination: Tensor) -> PendingReads:
        """Start what :meth:`read_into` does.

        Raises:
            StorageError: the last write of this record failed.
        """
        self._fits(key, self._extents[key], destination)
        return self._start_read([key], [destination], ahead=False)

    def mapped(self, key: str) -> Tensor:
        """Return a record as a tensor over a private mapping of the file, so that it takes no memory.

        What is written into the tensor stays in memory, and the file as it was. Before, the record is
        compared with its checksums where a read of it would be.

        Raises:
            StorageError: its last write failed, or it cannot be read (CorruptDataError: other bytes are
                there than were written, or fewer).
        """
        extent = self._extents[key]
        self._refuse_unwritten(key)
        if self._is_to_compare(extent):
            self._compare_in_parts(key, extent)
        if self._file.size() < extent.offset + extent.nbytes:
            raise CorruptDataError(
                f"{self.path}: record {key!r} lies after the end of the file, which was cut"
            )
        try:
            mapping = mmap.mmap(
                self._file.descriptor,
                extent.nbytes,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=extent.offset,
            )
        except OSError as error:
            raise refused(error, f"mapping {extent.nbytes} bytes at {extent.offset}", self.path) from error
        return torch.frombuffer(mapping, dtype=extent.dtype)

    def _compare_in_parts(self, key: str, extent: _Extent) -> None:
        """Read a record piece by piece, only to compare it with its checksums."""
        found: list[int] = []
        for start in range(0, extent.nbytes, _COMPARED_AT_ONCE):
            part = self._engine.empty(min(_COMPARED_AT_ONCE, extent.nbytes - start), torch.uint8)
            self._engine.read(self._file, [(extent.offset + start, part)]).wait()
            found += checksums(part, _CHECKSUM_BLOCK)
        self._judge(key, extent, found)

    def place(self, key: str) -> tuple[File, int, torch.dtype, int]:
        """Return a record's file, offset in bytes, dtype and elements, for who reads it by other means.

        Raises:
            StorageError: its last write failed.
        """
        self._refuse_unwritten(key)
        extent = self._extents[key]
        return self._file, extent.offset, extent.dtype, extent.numel

    def compare(self, key: str, tensor: Tensor) -> None:
        """Compare what was read of a record with its checksums, where the settings want that.

        Every read ends here, and with it the manifest is published where that is due.

        Raises:
            CorruptDataError: other bytes are there than were written.
        """
        with self._lock:
            if self._manifest.is_due():
                self._publish_if_there_is_room()
        extent = self._extents[key]
        if self._is_to_compare(extent):
            self._judge(key, extent, checksums(tensor, _CHECKSUM_BLOCK))

    def holds(self, key: str, tensor: Tensor) -> bool:
        """Tell whether a record is bit for bit this tensor, by the checksums and then by its bytes."""
        extent = self._extents.get(key)
        flat = tensor.detach().reshape(-1)
        if extent is None or not extent.written or (extent.dtype, extent.numel) != (flat.dtype, flat.numel()):
            return False
        if extent.crc32c != checksums(flat, _CHECKSUM_BLOCK):
            return False
        ours = flat.view(torch.uint8)
        for start in range(0, extent.nbytes, _COMPARED_AT_ONCE):
            part = ours[start : start + _COMPARED_AT_ONCE]
            theirs = self._engine.empty(part.numel(), torch.uint8)
            self._engine.read(self._file, [(extent.offset + start, theirs)]).wait()
            if not torch.equal(part, theirs):
                return False
        return True

    def _start_read(self, keys: Sequence[str], destinations: list[Tensor], ahead: bool) -> PendingReads:
        pieces = [(self.place(key)[1], to) for key, to in zip(keys, destinations, strict=True)]
        return PendingReads(self, keys, destinations, self._engine.read(self._file, pieces, ahead=ahead))

    def _refuse_unwritten(self, key: str) -> None:
        if not self._extents[key].written:
            raise StorageError(
                f"{self.path}: record {key!r} cannot be read, since its last write failed; start the run "
                "again from its last checkpoint"
            )

    def _is_to_compare(self, extent: _Extent) -> bool:
        policy = self._engine.settings.checksum
        return policy == "always" or (policy == "first" and not extent.compared)

    def _judge(self, key: str, extent: _Extent, found: list[int]) -> None:
        extent.compared = found == extent.crc32c
        if not extent.compared:
            block = next(
                i for i, pair in enumerate(zip(found, extent.crc32c, strict=True)) if pair[0] != pair[1]
            )
            offset = extent.offset + block * _CHECKSUM_BLOCK
            raise CorruptDataError(
                f"{self.path}: record {key!r}, block of {_CHECKSUM_BLOCK} bytes at offset {offset}: the "
                f"checksum is {found[block]:#010x}, written was {extent.crc32c[block]:#010x}. The file was "
                "changed by somebody else, or the disk is faulty (see the kernel's log); start the run again"
            )

    def _place(self, key: str, dtype: torch.dtype, numel: int) -> _Extent:
        extent = _Extent(self._end, dtype, numel, [])
        room = -(-extent.nbytes // _PAGE) * _PAGE
        self._file.preallocate(self._end, room)
        self._end += room
        self._extents[key] = extent
        self._manifest.changed = True
        return extent

    def close(self) -> None:
        """End the engines and remove the folder. Idempotent."""
        self._engine.close()
        self._writer.close()
        self._opened = None
        self._folder.remove()

    def _fits(self, key: str, extent: _Extent, flat: Tensor) -> None:
        if (flat.dtype, flat.numel()) != (extent.dtype, extent.numel):
            raise ValueError(
                f"record {key!r} holds {extent.numel} elements of {extent.dtype}, not {flat.numel()} of "
                f"{flat.dtype}"
            )

    def _publish_if_there_is_room(self, *, with_checksums: bool = True) -> None:
        """Publish; on a full disk, where records have their room, only checking from outside suffers."""
        try:
            self._publish(with_checksums=with_checksums)
        except StorageFullError as error:
            if not with_checksums:  # what is there is about to be wrong
                (self._folder.path / MANIFEST_NAME).unlink(missing_ok=True)
                for extent in self._extents.values():
                    extent.told = False
            if self._manifest.refused():
                logger.warning("%s. Until there is room, peftds verify cannot check this store", error)

    def _publish(self, *, with_checksums: bool = True) -> None:
        told = {key: with_checksums and e.written and not e.rewritten for key, e in self._extents.items()}
        records = tuple(
            Record(
                key=key,
                dtype=str(extent.dtype).removeprefix("torch."),
                shape=(extent.numel,),
                offset=extent.offset,
                nbytes=extent.nbytes,
                crc32c=tuple(extent.crc32c) if told[key] else None,
            )
            for key, extent in self._extents.items()
        )
        manifest = Manifest(
            magic=MAGIC,
            version=VERSION,
            data_file=self._folder.data_path.name,
            file_bytes=self._end,
            block_bytes=_CHECKSUM_BLOCK,
            rank=self._rank,
            world_size=self._world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            records=records,
        )
        write_manifest(self._folder.path, manifest)
        for key, extent in self._extents.items():
            extent.told, extent.rewritten = told[key], self._volatile
        complete = self._volatile or all(told.values())
        self._manifest.published(complete=complete, withdrawn=not with_checksums)


class _PublishedManifest:
    """When the manifest on the disk is written anew.

    It never tells a checksum that a write is about to make wrong, or that is not on the disk yet: before
    such a write it is published without checksums, and with them again at a later read, after a pause that
    doubles each time. What is written again and again, as trainable parameters are, is told of without
    checksums.
    """

    def __init__(self) -> None:
        self.changed = False
        self._was_refused = False
        self._pause = _PUBLISH_SECONDS
        self._next = time.monotonic()

    def is_due(self) -> bool:
        return self.changed and time.monotonic() >= self._next

    def published(self, *, complete: bool, withdrawn: bool) -> None:
        """Note that it was published; ``complete`` if it has the checksums of all records."""
        self.changed = not complete
        if withdrawn or not complete:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        self._was_refused = False
        self._next = time.monotonic() + self._pause

    def refused(self) -> bool:
        """Note that there was no room for it; returns whether that is news."""
        news, self._was_refused = not self._was_refused, True
        self.changed = True
        self._next = time.monotonic() + self._pause
        return news


class PendingWrite:
    """One record on its way to the disk."""

    def __init__(self, file: SwapFile, key: str, ticket: Ticket) -> None:
        self._file, self._key, self._ticket = file, key, ticket

    def wait(self) -> None:
        """Wait for the bytes to be there.

        Raises:
            StorageError: the write failed; the record cannot be read until it is written again.
        """
        self._ticket.wait()
        self._file.note_written(self._key)


class PendingReads:
    """Records on their way into memory."""

    def __init__(self, file: SwapFile, keys: Sequence[str], tensors: list[Tensor], ticket: Ticket) -> None:
        self._file, self._keys, self._tensors = file, keys, tensors
        self._ticket = ticket

    def wait(self) -> list[Tensor]:
        """Wait for the bytes, compare them with their checksums where that is due, and return them.

        Raises:
            StorageError: a read failed (CorruptDataError: other bytes are there than were written).
        """
        self._ticket.wait()
        for key, tensor in zip(self._keys, self._tensors, strict=True):
            self._file.compare(key, tensor)
        return self._tensors


class PendingRead:
    """One record on its way into memory."""

    def __init__(self, reads: PendingReads) -> None:
        self._reads = reads

    def wait(self) -> Tensor:
        """Do as :meth:`PendingReads.wait` does."""
        (tensor,) = self._reads.wait()
        return tensor
