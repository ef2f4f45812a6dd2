# SPDX-License-Identifier: Apache-2.0
"""One safetensors file: where its tensors lie, and whether it is still the file that was looked at.

Files come from elsewhere, so that nothing they say is believed before it was compared with the file's size.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from peftds_ext.errors import CheckpointError, CorruptDataError, StorageError
from peftds_ext.store.refusals import reason_of, refused

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's dtypes whose elements are whole bytes and that torch knows."""

_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_MAX_DIMENSIONS: Final = 64
_MAX_SIZE: Final = (1 << 63) - 1
_SHOWN: Final = 200
_SHORTENED: Final = reprlib.Repr()
_SHORTENED.maxstring = _SHOWN


@dataclass(frozen=True)
class CheckpointFile:
    """One file, and how it is recognised again."""

    path: Path
    """Links in it are not resolved."""
    size: int
    device: int
    inode: int
    mtime_ns: int
    header_sha256: str
    """Of everything that precedes the tensors' bytes, the header's length included."""


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a file."""

    name: str
    file: CheckpointFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the start of the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_file(path: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of one file by name.

    Raises:
        CheckpointError: the file is damaged, or holds what cannot be read in place.
        StorageError: the system refused (CorruptDataError: the file was cut while it was read).
    """
    with opened(path) as (descriptor, status):
        head = _read_head(path, descriptor, status.st_size)
        digest = hashlib.sha256(head).hexdigest()
        file = CheckpointFile(path, status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, digest)
        header = json_object(path, head[_LENGTH_BYTES:])
        header.pop(_METADATA, None)
        tensors = {name: _tensor(file, len(head), name, entry) for name, entry in header.items()}
        _refuse_gaps(file, len(head), tensors)
        _ask_the_library(path, descriptor)
    return tensors


def check_unchanged(file: CheckpointFile, descriptor: int) -> None:
    """Make sure that ``descriptor`` is open on the very file that was looked at, and that nobody wrote to it.

    Raises:
        CorruptDataError: it is another file, or was changed; the message says what differs.
        StorageError: the system refused.
    """
    with refusals(file.path):
        status = os.fstat(descriptor)
    compared = {
        "size": (file.size, status.st_size),
        "device": (file.device, status.st_dev),
        "inode": (file.inode, status.st_ino),
        "mtime_ns": (file.mtime_ns, status.st_mtime_ns),
    }
    differing = [f"{what} was {old}, is {new}" for what, (old, new) in compared.items() if old != new]
    if differing:
        raise CorruptDataError(
            f"{file.path}: the checkpoint was changed while it was in use ({', '.join(differing)}); leave it "
            f"alone during a run, and start the run again"
        )


def check_header(file: CheckpointFile, descriptor: int) -> None:
    """Make sure of :func:`check_unchanged`, and that the header is still the one that was read.

    Times of a change can be too coarse, or set back; where tensors lie must not be taken on their word.

    Raises:
        CorruptDataError: it is another file, or was changed; the message says what differs.
        StorageError: the system refused.
    """
    check_unchanged(file, descriptor)
    if hashlib.sha256(_read_head(file.path, descriptor, file.size)).hexdigest() != file.header_sha256:
        raise CorruptDataError(
            f"{file.path}: the header of the checkpoint was changed while it was in use; leave it alone "
            "during a run, and start the run again"
        )


def read_tensor(tensor: CheckpointTensor) -> torch.Tensor:
    """Return a copy of a tensor in new host memory; meant for small ones.

    Raises:
        CorruptDataError: the file is not the one that was looked at, or ends too early.
        StorageError: the system refused.
    """
    path = tensor.file.path
    with opened(path) as (descriptor, _):
        check_unchanged(tensor.file, descriptor)
        # Bytes on a named device: what torch.empty makes otherwise may have been redirected.
        content = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
        read_exactly(path, descriptor, content.numpy().data, tensor.offset)
    return content.view(tensor.dtype).view(tensor.shape)


def _read_head(path: Path, descriptor: int, size: int) -> bytearray:
    """Return all that precedes the tensors' bytes; memory is taken only for what the file can hold."""
    if size < _LENGTH_BYTES:
        raise damaged(path, f"has {size} bytes, and the length of its header alone takes {_LENGTH_BYTES}")
    prefix = bytearray(_LENGTH_BYTES)
    read_exactly(path, descriptor, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise damaged(path, f"the header is to have {length} bytes, and {MAX_HEADER_BYTES} is the limit")
    if _LENGTH_BYTES + length > size:
        raise damaged(path, f"the header ends at byte {_LENGTH_BYTES + length}, the file at {size}")
    head = prefix + bytearray(length)
    read_exactly(path, descriptor, memoryview(head)[_LENGTH_BYTES:], _LENGTH_BYTES)
    return head


def _tensor(file: CheckpointFile, start: int, name: str, entry: object) -> CheckpointTensor:
    """Check what the header says of one tensor, against itself and the file; its data begin at ``start``."""

    def bad(reason: str) -> CheckpointError:
        return damaged(file.path, f"tensor {short(name)} {reason}")

    if not isinstance(entry, dict):
        raise bad(f"is described by {short(entry)}, which is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"has dtype {short(dtype)}, none of {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise bad(f"has shape {short(shape)}, not at most {_MAX_DIMENSIONS} sizes from 0 to {_MAX_SIZE}")
    if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > _MAX_SIZE:
        raise bad(f"has shape {short(shape)}, which is beyond {_MAX_SIZE} bytes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"has data_offsets {short(offsets)}, not where it begins and ends")
    begin, end = offsets
    if start + end > file.size:
        raise bad(f"ends at byte {start + end}, the file at {file.size}")
    tensor = CheckpointTensor(name, file, DTYPES[dtype], tuple(shape), start + begin)
    if tensor.nbytes != end - begin:
        raise bad(f"has {end - begin} bytes, but {dtype} of shape {short(shape)} has {tensor.nbytes}")
    return tensor


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    # A bool is an int to isinstance.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value)


def _refuse_gaps(file: CheckpointFile, start: int, tensors: Mapping[str, CheckpointTensor]) -> None:
    """In this format each byte after the header belongs to one tensor."""
    position = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        begins = f"tensor {short(tensor.name)} begins at byte {tensor.offset}"
        if tensor.offset < position:
            raise damaged(file.path, f"{begins}, inside another that ends at {position}")
        if tensor.offset > position:
            raise damaged(file.path, f"{begins}, and the bytes from {position} belong to none")
        position += tensor.nbytes
    if position != file.size:
        raise damaged(file.path, f"the last tensor ends at byte {position}, the file at {file.size}")


def _ask_the_library(path: Path, descriptor: int) -> None:
    """Refuse what the format's own library does; it gets the open file, whatever is at the path by now."""
    try:
        with safe_open(f"/proc/self/fd/{descriptor}", framework="np"):
            pass
    except SafetensorError as error:
        raise damaged(path, f"the safetensors library refuses it: {str(error)[:_SHOWN]}") from error


def json_object(path: Path, content: bytearray) -> dict[str, Any]:
    """Parse an object in which no key is there twice; anything else is a CheckpointError."""
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    else:
        if isinstance(parsed, dict):
            return parsed
        reason = f"it is {short(parsed)}"
    # Without the cause: it holds all of the text.
    raise damaged(path, f"no JSON object in UTF-8: {reason}")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {short(key)} is there twice")
        found[key] = value
    return found


def read_exactly(path: Path, descriptor: int, target: memoryview, offset: int) -> None:
    """Fill ``target`` with the bytes from ``offset``; CorruptDataError if the file ends before."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise CorruptDataError(
                f"{path}: ends at byte {offset + done}, but {len(target)} bytes from {offset} were to be "
                f"read; it was cut meanwhile: fetch it again"
            )
        done += count


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file to read; a pipe or a device is not waited for. What the system refuses is typed."""
    with refusals(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(path, "is no regular file")
            yield descriptor, status
        finally:
            os.close(descriptor)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn what the system refuses about ``path`` into a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        message = (
            f"cannot read the checkpoint: {reason_of(error)}; give one that exists and that you may read"
        )
        raise refused(error, message, path) from error


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error to raise: the file and the remedy around ``reason``."""
    return CheckpointError(f"{path}: {reason}; it is damaged or no safetensors checkpoint: fetch it again")


def short(value: object) -> str:
    """Return ``repr(value)``, of bounded length whatever a file made it."""
    return _SHORTENED.repr(value)
