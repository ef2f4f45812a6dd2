# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a safetensors checkpoint lie, so that their bytes can be read in place.

A checkpoint is one file, or several and an index that says which tensor is in which.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeGuard

from peftds_ext.errors import CheckpointError, StorageError
from peftds_ext.store.checkpoint_file import (
    MAX_HEADER_BYTES,
    CheckpointFile,
    CheckpointTensor,
    check_header,
    check_unchanged,
    damaged,
    json_object,
    opened,
    read_exactly,
    read_file,
    read_tensor,
    refusals,
    short,
)

__all__ = [
    "CheckpointFile",
    "CheckpointTensor",
    "check_header",
    "check_unchanged",
    "read_checkpoint",
    "read_tensor",
]

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
SUFFIX: Final = ".safetensors"
MAX_INDEX_BYTES: Final = MAX_HEADER_BYTES

_MAX_NAME: Final = 255


def read_checkpoint(path: Path) -> Mapping[str, CheckpointTensor]:
    """Find the tensors of the checkpoint ``path``, a folder or one safetensors file, by name.

    Of a folder is read ``model.safetensors.index.json`` and what it names in the files beside it; without it
    ``model.safetensors``; without that the only ``*.safetensors`` file. No tensor's bytes are read.

    Raises:
        CheckpointError: a file or the index is damaged, contradicts itself, holds what cannot be read in
            place, or is not there; the message names the file, the tensor and the byte or limit.
        StorageError: the system refused (CorruptDataError: a file was cut while it was read).
    """
    path = path.absolute()
    with refusals(path):
        if not stat.S_ISDIR(path.stat().st_mode):
            return read_file(path)
        names = [entry.name for entry in path.iterdir()]
    if INDEX_NAME in names:
        return _read_indexed(path / INDEX_NAME)
    return read_file(path / _only_file(path, names))


def _only_file(folder: Path, names: Sequence[str]) -> str:
    if SINGLE_NAME in names:
        return SINGLE_NAME
    found = [name for name in names if name.endswith(SUFFIX)]
    if not found:
        raise CheckpointError(
            f"{folder}: no *{SUFFIX} file; give a checkpoint's folder, or convert it to safetensors"
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{folder}: {len(found)} *{SUFFIX} files, but neither {INDEX_NAME} nor {SINGLE_NAME} says which "
            f"of them are the model; fetch the index, or give the one file"
        )
    return found[0]


def _read_indexed(index: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors that the index names, each from the file that it names for it."""
    tensors: dict[str, CheckpointTensor] = {}
    for file_name, wanted in _names_by_file(index).items():
        found = _read_named(index, file_name, wanted[0])
        for name in wanted:
            if name not in found:
                raise damaged(index, f"tensor {short(name)} is to be in {file_name}, which does not hold it")
            tensors[name] = found[name]
    return tensors


def _names_by_file(index: Path) -> Mapping[str, Sequence[str]]:
    """Return the names of tensors by name of file. Files lie beside the index: no name leads elsewhere."""
    weight_map = _read_index(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "has no weight_map that names the files of tensors")
    names: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        if not _is_plain_name(file_name):
            raise damaged(index, f"tensor {short(name)} is to be in {short(file_name)}, no plain file name")
        names.setdefault(file_name, []).append(name)
    return names


def _read_index(index: Path) -> Mapping[str, object]:
    with opened(index) as (descriptor, status):
        if status.st_size > MAX_INDEX_BYTES:
            raise damaged(index, f"has {status.st_size} bytes, and {MAX_INDEX_BYTES} is the limit")
        content = bytearray(status.st_size)
        read_exactly(index, descriptor, memoryview(content), 0)
    return json_object(index, content)


def _is_plain_name(name: object) -> TypeGuard[str]:
    """Tell whether it names a file of its folder; what cannot be printed may be no file name at all."""
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        return False
    return name not in (".", "..") and "/" not in name and name.isprintable()


def _read_named(index: Path, file_name: str, wanted: str) -> dict[str, CheckpointTensor]:
    try:
        return read_file(index.with_name(file_name))
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        reason = f"tensor {short(wanted)} is to be in {file_name}, and there is no such file"
        raise damaged(index, reason) from error
