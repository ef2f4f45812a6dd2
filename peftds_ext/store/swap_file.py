# SPDX-License-Identifier: Apache-2.0
"""One data file that holds tensors one after another, with checksums and a manifest beside it.

A record is placed, and its space on the disk taken, when it is first written; it keeps its place. Records
begin at multiples of a page, so that their transfers need no copy.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy
import torch
from torch import Tensor

from peftds_ext.errors import CorruptDataError, StorageError, StorageFullError
from peftds_ext.store.engine import StorageEngine, checksums
from peftds_ext.store.folder import StoreFolder
from peftds_ext.store.manifest import MAGIC, MANIFEST_NAME, VERSION, Manifest, Record, write_manifest

if TYPE_CHECKING:
    from peftds_ext._native._core import File, Ticket

logger = logging.getLogger("peftds_ext")

_PAGE: Final = 4096
_CHECKSUM_BLOCK: Final = 1 << 20
_COMPARED_AT_ONCE: Final = 8 << 20
_PUBLISH_SECONDS: Final = 2.0


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

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class SwapFile:
    """Tensors on a disk, by key. Thread-safe, except that one key is not written and read at once."""

    def __init__(
        self, folder: StoreFolder, engine: StorageEngine, *, rank: int = 0, world_size: int = 1
    ) -> None:
        """Make the data file in ``folder``.

        Raises:
            StorageError: the file cannot be made.
        """
        self._folder, self._engine = folder, engine
        self._rank, self._world_size = rank, world_size
        self._opened: File | None = engine.create_file(folder.data_path)
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
        flat = tensor.detach().reshape(-1)
        with self._lock:
            extent = self._extents.get(key) or self._place(key, flat)
            self._fits(key, extent, flat)
            if self._manifest.tells_of(extent.offset):
                self._publish_if_there_is_room(with_checksums=False)
            extent.crc32c = checksums(flat, _CHECKSUM_BLOCK)
            extent.compared = extent.written = False
        self._engine.write(self._file, [(extent.offset, flat)]).wait()
        with self._lock:
            extent.written = self._manifest.changed = True

    def fetch(self, key: str, *, ahead: bool = False) -> PendingRead:
        """Start reading a record into new memory of the engine's arena.

        Raises:
            StorageError: the last write of this record failed.
        """
        extent = self._extents[key]
        return self._start_read(key, self._engine.empty(extent.numel, extent.dtype), ahead)

    def read_into(self, key: str, destination: Tensor) -> None:
        """Read a record into memory of the caller's, contiguous and of the record's dtype and size.

        Raises:
            StorageError: the read failed (CorruptDataError: other bytes are there than were written).
        """
        self._fits(key, self._extents[key], destination)
        self._start_read(key, destination, ahead=False).wait()

    def mapped(self, key: str) -> Tensor:
        """Return a record as a tensor over a private mapping of the file.

        Nothing is read before it is looked at. What is written into the tensor stays in memory, and the
        file as it was.
        """
        extent = self._extents[key]
        shape = (extent.nbytes,)
        bytes_ = numpy.memmap(self.path, dtype=numpy.uint8, mode="c", offset=extent.offset, shape=shape)
        return torch.from_numpy(bytes_).view(extent.dtype)

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

    def _start_read(self, key: str, destination: Tensor, ahead: bool) -> PendingRead:
        if not self._extents[key].written:
            raise StorageError(
                f"{self.path}: record {key!r} cannot be read, since its last write failed; start the run "
                "again from its last checkpoint"
            )
        with self._lock:
            if self._manifest.is_due():
                self._publish_if_there_is_room()
        pieces = [(self._extents[key].offset, destination)]
        return PendingRead(self, key, destination, self._engine.read(self._file, pieces, ahead=ahead))

    def _compare(self, key: str, tensor: Tensor) -> None:
        extent, policy = self._extents[key], self._engine.settings.checksum
        if policy == "off" or (policy == "first" and extent.compared):
            return
        found = checksums(tensor, _CHECKSUM_BLOCK)
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

    def _place(self, key: str, flat: Tensor) -> _Extent:
        extent = _Extent(self._end, flat.dtype, flat.numel(), [])
        room = -(-extent.nbytes // _PAGE) * _PAGE
        self._file.preallocate(self._end, room)
        self._end += room
        self._extents[key] = extent
        return extent

    def close(self) -> None:
        """End the engine and remove the folder. Idempotent."""
        self._engine.close()
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
            if self._manifest.refused(withdrawn=not with_checksums):
                logger.warning("%s. Until there is room, peftds verify cannot check this store", error)

    def _publish(self, *, with_checksums: bool = True) -> None:
        records = tuple(
            Record(
                key=key,
                dtype=str(extent.dtype).removeprefix("torch."),
                shape=(extent.numel,),
                offset=extent.offset,
                nbytes=extent.nbytes,
                crc32c=tuple(extent.crc32c) if with_checksums and extent.written else None,
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
        self._manifest.published(up_to=self._end if with_checksums else 0)


class _PublishedManifest:
    """When the manifest on the disk is written anew.

    It never tells a checksum that a write is about to make wrong, or that is not on the disk yet: before
    such a write it is published without checksums, and with them again at a later read, after a pause that
    doubles each time.
    """

    def __init__(self) -> None:
        self.changed = False
        self._told_up_to = 0
        self._was_refused = False
        self._pause = _PUBLISH_SECONDS
        self._next = time.monotonic()

    def tells_of(self, offset: int) -> bool:
        """Whether the manifest on the disk has the checksums of the record at this offset."""
        return offset < self._told_up_to

    def is_due(self) -> bool:
        return self.changed and time.monotonic() >= self._next

    def published(self, up_to: int) -> None:
        """Note that checksums of all records before the offset ``up_to`` are on the disk now."""
        self.changed = up_to == 0
        if up_to < self._told_up_to:
            self._pause *= 2
        self._told_up_to = up_to
        self._was_refused = False
        self._next = time.monotonic() + self._pause

    def refused(self, *, withdrawn: bool) -> bool:
        """Note that there was no room for it; returns whether that is news."""
        news, self._was_refused = not self._was_refused, True
        self.changed = True
        if withdrawn:
            self._told_up_to = 0
        self._next = time.monotonic() + self._pause
        return news


class PendingRead:
    """A record on its way into memory."""

    def __init__(self, file: SwapFile, key: str, tensor: Tensor, ticket: Ticket) -> None:
        self._file, self._key, self._tensor = file, key, tensor
        self._ticket = ticket

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return self._tensor.nbytes

    def wait(self) -> Tensor:
        """Wait for the bytes, compare them with their checksums where that is due, and return them.

        Raises:
            StorageError: the read failed (CorruptDataError: other bytes are there than were written).
        """
        self._ticket.wait()
        self._file._compare(self._key, self._tensor)
        return self._tensor
