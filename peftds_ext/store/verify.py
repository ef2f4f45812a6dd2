# SPDX-License-Identifier: Apache-2.0
"""Compares the bytes of stores with their manifests. Only reads, without a lock, also while owners run."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal, TypeAlias

from peftds_ext import _native
from peftds_ext.errors import CorruptDataError, StorageError
from peftds_ext.store.folder import SWAP_NAME, is_store_name
from peftds_ext.store.manifest import MANIFEST_NAME, Manifest, Record, read_manifest
from peftds_ext.store.refusals import reason_of, refused

Kind: TypeAlias = Literal["manifest", "truncated", "unreadable", "checksum"]
_Checksums: TypeAlias = Callable[[memoryview, int], list[int]]


@dataclass(frozen=True)
class Damage:
    """One finding; ``key``, ``offset`` in the file and ``length`` are None if it is about the whole file."""

    kind: Kind
    path: Path
    reason: str
    key: str | None = None
    offset: int | None = None
    length: int | None = None


@dataclass(frozen=True)
class StoreReport:
    """What was found in one store."""

    folder: Path
    records: int
    checked_records: int
    """Those that have checksums; of a damaged one all blocks that can be read were checked."""
    checked_bytes: int
    """Bytes that were read and compared."""
    skipped: tuple[str, ...]
    """Keys of records that are rewritten during the run and have no checksums."""
    damage: tuple[Damage, ...]

    @property
    def intact(self) -> bool:
        """Nothing was found."""
        return not self.damage


def verify(path: Path) -> list[StoreReport]:
    """Check every block of the store ``path``, or of each store in it or in its ``peftds_ext_swap``.

    A store that its process removes meanwhile is left out.

    Raises:
        StorageError: the folder cannot be read, or holds no store.
        NativeLoadError: the compiled core, which computes the checksums, cannot be loaded.
    """
    checksums: _Checksums = _native.core().crc32c_blocks
    reports = [_verify_store(folder, checksums) for folder in _store_folders(path)]
    found = [report for report in reports if report is not None]
    if not found:
        raise StorageError(
            f"{path} holds no store; give a store folder, or the nvme_path of a running process"
        )
    return found


def _store_folders(path: Path) -> list[Path]:
    try:
        entries = list(path.iterdir())
        if is_store_name(path.absolute().name) or path / MANIFEST_NAME in entries:
            return [path]
        if path / SWAP_NAME in entries:
            entries = list((path / SWAP_NAME).iterdir())
        return sorted(e for e in entries if is_store_name(e.name) and e.is_dir() and not e.is_symlink())
    except OSError as error:
        message = f"cannot read the folder: {reason_of(error)}; give a folder that you may read"
        raise refused(error, message, path) from error


def _verify_store(folder: Path, checksums: _Checksums) -> StoreReport | None:
    """Report on one store; None if it has vanished."""
    try:
        manifest = read_manifest(folder)
    except CorruptDataError as error:
        kind: Kind = "manifest" if error.errno in (None, errno.ENOENT) else "unreadable"
        damage = Damage(kind, folder / MANIFEST_NAME, str(error))
        return StoreReport(folder, 0, 0, 0, (), (damage,)) if not _vanished(folder) else None
    check = _Check(folder / manifest.data_file, manifest, checksums)
    damages = tuple(check.run())
    if damages and _vanished(folder):
        return None
    skipped = tuple(record.key for record in manifest.records if record.crc32c is None)
    records = len(manifest.records)
    return StoreReport(folder, records, records - len(skipped), check.compared, skipped, damages)


def _vanished(folder: Path) -> bool:
    try:
        folder.lstat()
    except OSError as error:
        return error.errno == errno.ENOENT
    return False


class _Check:
    """Compares one data file with its manifest, block by block."""

    def __init__(self, path: Path, manifest: Manifest, checksums: _Checksums) -> None:
        self.compared = 0
        self._path, self._manifest, self._checksums = path, manifest, checksums
        largest = max((record.nbytes for record in manifest.records), default=0)
        self._block = memoryview(bytearray(min(manifest.block_bytes, largest)))

    def run(self) -> Iterator[Damage]:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    yield Damage("unreadable", self._path, "the data file is no regular file")
                    return
                yield from self._file_size(status.st_size)
                for record in self._manifest.records:
                    yield from self._record(file, record, status.st_size)
        except OSError as error:
            yield Damage("unreadable", self._path, f"cannot open the data file: {reason_of(error)}")

    def _file_size(self, size: int) -> Iterator[Damage]:
        # It may be longer: no record is in what follows.
        if size < self._manifest.file_bytes:
            reason = f"the file has {size} bytes of {self._manifest.file_bytes}"
            yield Damage("truncated", self._path, reason)

    def _record(self, file: BufferedReader, record: Record, size: int) -> Iterator[Damage]:
        if record.nbytes and record.end > size:
            start = max(record.offset, size)
            reason = f"bytes {start} to {record.end} lie after the end of the file"
            yield Damage("truncated", self._path, reason, record.key, start, record.end - start)
        step = self._manifest.block_bytes
        for index, expected in enumerate(record.crc32c or ()):
            offset = record.offset + index * step
            length = min(step, record.end - offset)
            if offset + length <= size:
                yield from self._one_block(file, record.key, offset, length, expected)

    def _one_block(
        self, file: BufferedReader, key: str, offset: int, length: int, expected: int
    ) -> Iterator[Damage]:
        block = self._block[:length]
        try:
            file.seek(offset)
            count = file.readinto(block)
        except OSError as error:
            yield Damage("unreadable", self._path, f"cannot read: {reason_of(error)}", key, offset, length)
            return
        if count < length:
            reason = "the file was cut while it was read"
            yield Damage("truncated", self._path, reason, key, offset + count, length - count)
            return
        self.compared += length
        (found,) = self._checksums(block, self._manifest.block_bytes)
        if found != expected:
            reason = f"checksum {found:#010x}, written was {expected:#010x}"
            yield Damage("checksum", self._path, reason, key, offset, length)
