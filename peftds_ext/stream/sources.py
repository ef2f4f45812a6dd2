# SPDX-License-Identifier: Apache-2.0
"""Where the parameters of a model lie in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from peftds_ext.store.checkpoint import CheckpointTensor, check_unchanged
from peftds_ext.store.engine import StorageEngine
from peftds_ext.store.records import Source, can_lie_in_place
from peftds_ext.stream.emptied import shape_of

if TYPE_CHECKING:
    from peftds_ext._native._core import File


def sources_of(
    checkpoint: Mapping[str, CheckpointTensor], model: nn.Module, engine: StorageEngine
) -> dict[str, Source]:
    """Return where the frozen parameters of a model lie in a checkpoint, for :class:`ModuleStream`.

    They are those that the checkpoint has under the same name and with the same shape, and that can lie in
    place. A tied parameter is found by any of its names, and returned by its first.

    Raises:
        CorruptDataError: a file is not what it was when the checkpoint was read.
        StorageError: a file cannot be opened.
    """
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    files: dict[Path, File] = {}
    sources: dict[str, Source] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = checkpoint.get(name)
        if tensor is None or parameter.requires_grad or tensor.shape != tuple(shape_of(parameter)):
            continue
        if not tensor.nbytes or can_lie_in_place(tensor.dtype, parameter.dtype, tensor.offset):
            continue
        path, numel = tensor.file.path, tensor.nbytes // tensor.dtype.itemsize
        if path not in files:
            opened = engine.open_file(path)
            check_unchanged(tensor.file, opened.descriptor)
            files[path] = opened
        sources.setdefault(
            first_names[parameter],
            Source(files[path], tensor.offset, tensor.dtype, parameter.dtype, numel, numel, read_only=True),
        )
    return sources
