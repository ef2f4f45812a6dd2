# SPDX-License-Identifier: Apache-2.0
"""The ``"peftds_ext"`` section of a DeepSpeed configuration, as one frozen and validated model.

A key that is left out means that the engine chooses. Unknown keys are refused, at any depth, with the
nearest known one proposed, so that a misspelt key never trains with a default in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from peftds_ext.errors import ConfigError

SECTION: Final = "peftds_ext"

_Model = TypeVar("_Model", bound=BaseModel)


class IoConfig(BaseModel):
    """The object ``"io"``: how files are read and written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["io_uring", "threads"] | None = None
    """Left out: io_uring where the system allows it, else threads."""

    queue_depth: int | None = Field(default=None, ge=1, le=1024, strict=True)
    """Requests in flight at once. Left out: ``aio.queue_depth`` where given, else by the kind of disk."""

    block_bytes: ByteSize | None = Field(default=None, ge=4096, le=1 << 30, multiple_of=4096)
    """Largest request, such as ``"1MiB"``. Left out: ``aio.block_size`` if given, else by kind of disk."""

    direct: bool = Field(default=True, strict=True)
    """Whether to go past the page cache where the file system allows it."""

    checksum: Literal["first", "always", "off"] = "first"
    """When what is read is compared with the checksums made when it was written: each record's first
    read after a write, every read, or never."""


class ParamsConfig(BaseModel):
    """The object ``"params"``: where frozen and trainable parameters are between their uses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["checkpoint", "store"] | None = None
    """``"checkpoint"``: frozen weights are read in place from the safetensors files of a model that
    ``peftds_ext.from_pretrained`` made. ``"store"``: from files of our own, or host memory. Left out:
    whichever the model was made for."""

    host_bytes: ByteSize | None = Field(default=None, ge=0)
    """How much of what lies on a disk may stay in host memory between uses, such as ``"16GiB"``."""

    device_bytes: ByteSize | None = Field(default=None, ge=0)
    """How much may stay on the device between uses. Both left out: ``stage3_max_reuse_distance``."""


class OptimizerConfig(BaseModel):
    """The object ``"optimizer"``: the form of Adam's states under optimizer offload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    states: Literal["fp32", "bf16", "int8"] | None = None
    """Form of both moments: ``"fp32"`` is exact and what leaving the key out means. ``"bf16"`` is rounded
    stochastically; ``"int8"`` has one scale per block of 256 elements, as bitsandbytes has it."""

    master: Literal["fp32", "split"] | None = None
    """Form of the master weights. ``"fp32"``: a copy beside the weight, as DeepSpeed keeps it. ``"split"``: a
    bf16 weight and a 16-bit remainder together are the master, exactly; of an fp32 weight nothing is kept
    beside it. Left out: split if ``states`` is compact, else fp32. Where weights are fp16, or on NVMe, a copy
    is kept in any case."""

    overlap: bool | None = Field(default=None, strict=True)
    """Whether ``step()`` returns when the gradients' norm is known, and parameters are updated while the next
    forward runs, which waits for those that it needs. Results are the same to the bit. Left out: where states
    are on NVMe under ZeRO-3, if no trainable parameter is persistent (see
    ``stage3_param_persistence_threshold``): such a one can be looked at without being gathered."""


class PeftdsConfig(BaseModel):
    """The section ``"peftds_ext"``; what a missing section means as well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(default=False, strict=True)
    """The switch. While it is false, everything is stock DeepSpeed."""

    on_conflict: Literal["error", "stock"] = "error"
    """What to do when another DeepSpeed feature excludes the engine: raise, or train with stock DeepSpeed."""

    params: ParamsConfig = ParamsConfig()
    """What stays in memory."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The form of Adam's states."""

    io: IoConfig = IoConfig()
    """The storage engine."""

    trace: str | None = Field(default=None, min_length=1)
    """A file for a trace of uses and transfers, which Chrome and Perfetto read."""


def parse_section(section: object) -> PeftdsConfig:
    """Validate the value found under the key ``"peftds_ext"``; the value is not changed.

    Raises:
        ConfigError: the section is not an object, has an unknown key, holds the word ``"auto"`` or a
            value of the wrong type. The message names the key, for example ``peftds_ext.enabled``.
    """
    return parse_model(PeftdsConfig, section, path=SECTION)


def parse_model(model: type[_Model], section: object, *, path: str) -> _Model:
    """Validate ``section`` against ``model`` and the models nested in it; ``path`` starts each key's name.

    Raises:
        ConfigError: as for :func:`parse_section`.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f"{path}: expected an object with keys such as {_known(model)}, got {section!r}")
    for key in _auto_keys(section, path):
        raise ConfigError(
            f'{key}: "auto" is not a value here. Leave the key out to let the engine choose '
            f'(accelerate raises an error on the word "auto")'
        )
    _refuse_unknown_keys(model, section, path)
    try:
        return model.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(error, path))) from error


def _refuse_unknown_keys(model: type[BaseModel], section: Mapping[Any, Any], path: str) -> None:
    for key, value in section.items():
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            near = difflib.get_close_matches(str(key), model.model_fields, n=1)
            hint = f"Did you mean {path}.{near[0]}? " if near else ""
            raise ConfigError(f"{path}.{key}: unknown key. {hint}Known keys: {_known(model)}")
        nested = _nested_model(field.annotation)
        if nested is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(nested, value, f"{path}.{key}")


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model that a field holds, also one behind ``| None``; else None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    found = (_nested_model(part) for part in parts)
    return next((model for model in found if model is not None), None)


def _auto_keys(value: object, path: str) -> Iterator[str]:
    if isinstance(value, str):
        if value == "auto":
            yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _auto_keys(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _auto_keys(item, f"{path}[{index}]")


def _describe(error: ValidationError, path: str) -> Iterator[str]:
    for item in error.errors(include_url=False):
        key = ".".join((path, *map(str, item["loc"])))
        yield f"{key}: {item['msg']}, got {item['input']!r}"


def _known(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
