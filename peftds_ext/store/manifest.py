# SPDX-License-Identifier: Apache-2.0
"""The manifest of a store: which bytes of the data file are which parameter, and their checksums.

The bytes of a record are cut into blocks of ``block_bytes``, counted from the record's start; the last one
may be shorter. Each block has one CRC-32C. A manifest that can be constructed can be written and read back.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from peftds_ext.errors import CorruptDataError, StorageError
from peftds_ext.store.refusals import reason_of, refused

MANIFEST_NAME: Final = "manifest.json"
MAGIC: Final = "peftds_ext.store"
VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 256 << 20
MAX_BLOCK_BYTES: Final = 1 << 30
"""A reader holds one block in memory, so that a manifest must not be able to ask for any size."""

_TEMPORARY: Final = re.compile(re.escape(MANIFEST_NAME) + r"\.[0-9a-f]{8}\.tmp")
_MAX_DIMENSIONS: Final = 64
_SHOWN_ERRORS: Final = 3
_REMEDY: Final = "the swap files of this run cannot be used; start the run again"

ITEM_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by torch's name of the dtype."""


def _known_dtype(name: str) -> str:
    if name not in ITEM_BYTES:
        raise ValueError("no dtype that this build knows")
    return name


def _plain_file_name(name: str) -> str:
    if name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError("not a plain file name")
    return name


_Size = Annotated[int, Field(ge=0, lt=1 << 63)]
_Checksum = Annotated[int, Field(ge=0, lt=1 << 32)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Record(_Model):
    """One parameter's extent in the data file."""

    key: str
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    """Torch's name without ``torch.``, for example ``bfloat16``."""
    shape: Annotated[tuple[_Size, ...], Field(max_length=_MAX_DIMENSIONS)]
    offset: _Size
    nbytes: _Size
    crc32c: tuple[_Checksum, ...] | None
    """One checksum per block; None: rewritten during the run, so that it cannot be verified."""

    @model_validator(mode="after")
    def _bytes_fit_the_shape(self) -> Record:
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.nbytes != expected:
            raise ValueError(f"{self.nbytes} bytes, but {self.dtype} of its shape has {_short(expected)}")
        return self

    @property
    def end(self) -> int:
        """The first byte after the record."""
        return self.offset + self.nbytes


class Manifest(_Model):
    """What the data file of one store holds, and which process wrote it."""

    magic: Literal["peftds_ext.store"]
    version: Literal[1]
    data_file: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_plain_file_name)]
    file_bytes: _Size
    block_bytes: Annotated[int, Field(ge=1, le=MAX_BLOCK_BYTES)]
    rank: _Size
    world_size: Annotated[int, Field(ge=1, lt=1 << 63)]
    pid: Annotated[int, Field(ge=1, lt=1 << 63)]
    host: str
    records: tuple[Record, ...]

    @model_validator(mode="after")
    def _records_fit_the_file(self) -> Manifest:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        _refuse_duplicate_keys(self.records)
        for record in self.records:
            if record.end > self.file_bytes:
                raise ValueError(
                    f"record {record.key!r}: ends at byte {record.end}, the file at {self.file_bytes}"
                )
            blocks = -(-record.nbytes // self.block_bytes)
            if record.crc32c is not None and len(record.crc32c) != blocks:
                raise ValueError(
                    f"record {record.key!r}: {len(record.crc32c)} checksums for {blocks} blocks of "
                    f"{self.block_bytes} bytes"
                )
        _refuse_overlaps(self.records)
        return self


def _refuse_duplicate_keys(records: Sequence[Record]) -> None:
    seen: set[str] = set()
    for record in records:
        if record.key in seen:
            raise ValueError(f"record {record.key!r}: there are two of this key")
        seen.add(record.key)


def _refuse_overlaps(records: Sequence[Record]) -> None:
    placed = sorted((record for record in records if record.nbytes), key=lambda record: record.offset)
    for before, after in itertools.pairwise(placed):
        if after.offset < before.end:
            raise ValueError(
                f"record {after.key!r}: starts at byte {after.offset}, inside record {before.key!r}, which "
                f"ends at {before.end}"
            )


def is_temporary_name(name: str) -> bool:
    """Tell whether a file of this name is a manifest that was never completed."""
    return _TEMPORARY.fullmatch(name) is not None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put the manifest into ``folder``; whenever a crash comes, there is a whole one, old or new, or none.

    Raises:
        StorageError: the system refused (StorageFullError: no room), or the manifest is too large to be read.
    """
    path = folder / MANIFEST_NAME
    content = manifest.model_dump_json().encode()
    if len(content) > MAX_MANIFEST_BYTES:
        raise StorageError(
            f"{path} would take {len(content)} bytes, and {MAX_MANIFEST_BYTES} is the most that is read; use "
            f"larger blocks than {manifest.block_bytes} bytes"
        )
    temporary = folder / f"{MANIFEST_NAME}.{secrets.token_hex(4)}.tmp"
    try:
        _write_synced(temporary, content)
        temporary.replace(path)
        _sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        message = f"cannot write the manifest of {len(content)} bytes: {reason_of(error)}"
        raise refused(
            error, f"{message}; give a folder on a disk with room that you may write to", path
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest in ``folder``.

    Raises:
        CorruptDataError: it is missing, cannot be read, or contradicts itself; nothing else is raised. The
            message names the file, the record and the reason; ``errno`` is set where the system refused.
    """
    path = folder / MANIFEST_NAME
    content = _read_limited(path)
    try:
        return Manifest.model_validate_json(content, strict=True)
    except ValidationError as error:
        reasons = "; ".join(_describe(error, content))
    # Without the cause: it repeats every record of a large manifest.
    raise CorruptDataError(f"{path} is no valid manifest: {reasons}; {_REMEDY}") from None


def _write_synced(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system keeps no folders that could be synced
            raise
    finally:
        os.close(descriptor)


def _read_limited(path: Path) -> bytes:
    """Return the bytes of a regular file of sane size; a pipe or a device is not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptDataError(f"{path} is no regular file; {_REMEDY}")
            if status.st_size > MAX_MANIFEST_BYTES:
                raise CorruptDataError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes; {_REMEDY}")
            return file.read(status.st_size)
    except CorruptDataError:
        raise
    except OSError as error:
        missing = error.errno == errno.ENOENT
        reason = "there is no manifest" if missing else f"cannot read the manifest: {reason_of(error)}"
        hint = "it is still being written, or its process ended before" if missing else _REMEDY
        raise CorruptDataError(error.errno, f"{reason}; {hint}", str(path)) from error
    except ValueError:  # a path that no file can have
        raise CorruptDataError(f"{str(path)!r} cannot be a file; {_REMEDY}") from None


def _describe(error: ValidationError, content: bytes) -> Iterator[str]:
    """Yield a few of the reasons; only those that say what the file is, where it is none of ours."""
    errors = error.errors(include_url=False)
    for name, known in (("magic", MAGIC), ("version", VERSION)):
        for item in errors:
            if item["loc"] == (name,):
                found = "missing" if item["type"] == "missing" else _short(item["input"])
                yield f"{name} is {found}, and this build reads {known!r}"
                return
    for item in errors[:_SHOWN_ERRORS]:
        yield _reason(item, content)
    if len(errors) > _SHOWN_ERRORS:
        yield f"and {len(errors) - _SHOWN_ERRORS} more"


def _reason(item: ErrorDetails, content: bytes) -> str:
    place = list(item["loc"])
    words = []
    if len(place) > 1 and place[0] == "records":
        words.append(_record_name(content, place[1]))
        place = place[2:]
    if place:
        words.append(".".join(_short(part, plain=True) for part in place))
    reason = item["msg"].removeprefix("Value error, ")
    says_it_all = item["type"] in ("missing", "json_invalid") or (item["type"] == "value_error" and not place)
    if not says_it_all:
        reason += f", got {_short(item['input'])}"
    return ": ".join([*words, reason])


def _record_name(content: bytes, index: int | str) -> str:
    """Name a record by its key where it has one; its content is JSON, only not what it ought to be."""
    key: Any = None
    with contextlib.suppress(LookupError, TypeError):
        key = from_json(content)["records"][index]["key"]
    return f"record {_short(key)}" if isinstance(key, str) else f"record number {index}"


def _short(value: object, *, plain: bool = False) -> str:
    text = str(value) if plain else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
