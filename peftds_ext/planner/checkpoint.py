# SPDX-License-Identifier: Apache-2.0
"""Shapes of a local safetensors checkpoint, from the file headers alone: no tensor is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from peftds_ext.errors import ConfigError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"

_PARAMETER_DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16"})
_BUFFER_DTYPES: Final = frozenset({"I64", "BOOL"})
_WEIGHT: Final = ".weight"

Shapes = Mapping[str, tuple[int, ...]]


def read_shapes(folder: Path) -> Shapes:
    """Return name and shape of every parameter of the checkpoint in ``folder``.

    Read is ``model.safetensors.index.json`` and the files it names; without it ``model.safetensors``; without
    that the only ``*.safetensors`` file. Integer buffers such as position ids are no parameters and left out.

    Raises:
        ConfigError: no such folder, no checkpoint, several files without an index, a damaged file or index, a
            file or a tensor that the index names and that is not there, or tensors in a packed (quantized)
            dtype, whose elements are not parameters. The message names the path.
    """
    if not folder.is_dir():
        raise ConfigError(f"--model {folder}: no such folder; give a local one, or use --params")
    index = folder / INDEX_NAME
    if not index.exists():
        return _file_shapes(_only_file(folder))
    shapes: dict[str, tuple[int, ...]] = {}
    weight_map = _weight_map(index)
    for file_name in sorted(set(weight_map.values())):
        shapes |= _file_shapes(folder / file_name, {k for k, v in weight_map.items() if v == file_name})
    return shapes


def parameter_count(shapes: Shapes) -> int:
    """Return the number of elements of all ``shapes``."""
    return sum(math.prod(shape) for shape in shapes.values())


def lora_count(shapes: Shapes, rank: int, target_modules: Sequence[str]) -> int:
    """Return the parameters of LoRA adapters: ``rank * (in + out)`` for each 2-D weight that is targeted.

    A module is targeted as in PEFT's ``LoraConfig``: its name is one of ``target_modules`` or ends with a dot
    and one of them. Source of the count: Hu et al., "LoRA" (2021, arXiv 2106.09685), section 4.1: a weight of
    shape (out, in) gets B of shape (out, rank) and A of shape (rank, in).

    Raises:
        ConfigError: ``rank`` is below 1, no target is given, or one matches no 2-D weight.
    """
    if rank < 1:
        raise ConfigError(f"--lora-rank is {rank}: give at least 1")
    if not target_modules:
        raise ConfigError("--target-modules is empty: name modules such as q_proj,v_proj")
    matrices = {
        name.removesuffix(_WEIGHT): shape
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(_WEIGHT)
    }
    for target in target_modules:
        if not any(_is_target(module, target) for module in matrices):
            known = ", ".join(sorted({module.rpartition(".")[2] for module in matrices})) or "none"
            raise ConfigError(f"--target-modules: {target!r} matches no 2-D weight; the model has {known}")
    return sum(
        rank * sum(shape)
        for module, shape in matrices.items()
        if any(_is_target(module, target) for target in target_modules)
    )


def _is_target(module: str, target: str) -> bool:
    return module == target or module.endswith("." + target)


def _only_file(folder: Path) -> Path:
    single = folder / SINGLE_NAME
    if single.exists():
        return single
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"--model {folder}: no *.safetensors file; convert the checkpoint to safetensors, or use --params"
        )
    if len(files) > 1:
        raise ConfigError(
            f"--model {folder}: {len(files)} *.safetensors files, but neither {INDEX_NAME} nor {SINGLE_NAME} "
            f"to say which of them are the model; use --params"
        )
    return files[0]


def _weight_map(index: Path) -> Mapping[str, str]:
    """Return tensor name to file name. Files lie beside the index; a path that leads elsewhere is refused."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        plain = all(Path(file_name).name == file_name for file_name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model: {index} is no checkpoint index ({error!r}); fetch it again") from error
    if not weight_map or not plain:
        raise ConfigError(f"--model: {index} names no files of its own folder; fetch it again")
    return dict(weight_map)


def _file_shapes(path: Path, wanted: set[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes in one file; all names of ``wanted``, if given, must be there."""
    try:
        # "np" needs neither torch nor a dtype that numpy knows as long as only the header is asked for.
        with safe_open(str(path), framework="np") as file:
            names = set(file.keys()) if wanted is None else wanted
            slices = {name: file.get_slice(name) for name in names}
            headers = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--model: {path} cannot be read ({error}); fetch it again") from error
    packed = sorted({dtype for dtype, _ in headers.values()} - _PARAMETER_DTYPES - _BUFFER_DTYPES)
    if packed:
        raise ConfigError(
            f"--model: {path} holds tensors of dtype {', '.join(packed)}, whose elements are not parameters: "
            f"give the number of parameters with --params"
        )
    return {name: shape for name, (dtype, shape) in headers.items() if dtype in _PARAMETER_DTYPES}
