# SPDX-License-Identifier: Apache-2.0
"""Builds a Hugging Face model whose large weights stay in the files of its checkpoint.

Transformers renames, splits, fuses and casts what it loads, differently in each model and version. Instead of
repeating that, its own loader is given a ``state_dict`` of stand-ins, and what it does with them is watched:
a parameter that is still a stand-in afterwards is that tensor of the checkpoint, under whatever name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from peftds_ext.errors import ConfigError, MissingDependencyError
from peftds_ext.store.checkpoint import CheckpointTensor, read_tensor

logger = logging.getLogger("peftds_ext")

_INSTALL: Final = "pip install 'peftds_ext[peft]'"
_FLOATS: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_DATA: Final = (torch.Tensor.data.__get__, torch.Tensor.data.__set__)  # type: ignore[attr-defined]
_COMPARED_BYTES: Final = 16 << 20
"""How much of two tensors is in memory at a time while they are compared."""

_NEW: Final = "not in the checkpoint: newly initialised"
_RESHAPED: Final = "of another shape in the checkpoint: newly initialised"
_MADE: Final = "made by transformers while it loads, not one tensor of the checkpoint as it is"

_PLACED: Final = "the engine decides where the weights live; leave it out"
_QUANTIZED: Final = "a quantized model cannot be streamed from its checkpoint; leave it out"
_SHARDED: Final = "the engine shards the weights itself; leave it out"
_OTHER_FILES: Final = "the weights are those of the safetensors checkpoint in the folder; leave it out"
_ADAPTED: Final = "load the base model, then its adapter with PEFT"
_EXCLUDED: Final[Mapping[str, str]] = {
    "state_dict": _OTHER_FILES,
    "gguf_file": _OTHER_FILES,
    "subfolder": "give the path of the subfolder itself",
    "variant": _OTHER_FILES,
    "from_tf": _OTHER_FILES,
    "from_flax": _OTHER_FILES,
    "device_map": _PLACED,
    "max_memory": _PLACED,
    "offload_folder": _PLACED,
    "offload_buffers": _PLACED,
    "offload_state_dict": _PLACED,
    "low_cpu_mem_usage": "the memory used is low without it; leave it out",
    "quantization_config": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "tp_plan": _SHARDED,
    "tp_size": _SHARDED,
    "device_mesh": _SHARDED,
    "distributed_config": _SHARDED,
    "adapter_kwargs": _ADAPTED,
    "adapter_name": _ADAPTED,
    "code_revision": "code of the model's own is not supported; leave it out",
    "output_loading_info": "what was not loaded is in the result; leave it out",
}
"""Arguments of ``from_pretrained`` that are refused, and what to do instead."""


@dataclass(frozen=True)
class Skeleton:
    """A model whose large weights are known by their place in the checkpoint."""

    model: Any
    """The ``PreTrainedModel``, on the CPU. Parameters in ``in_place`` have shape and dtype, but hold NaN."""
    in_place: dict[str, CheckpointTensor]
    """Parameter name, as in ``model.named_parameters()``, to the tensor whose values it has. The dtype in the
    file may be another floating one than the parameter's: then the values are to be cast."""
    copied: dict[str, str]
    """Parameter name to the reason why its values are in memory. Those below ``in_place_bytes`` that were
    simply loaded are in neither."""


def load_skeleton(
    auto_class: Any,
    path: str | Path,
    checkpoint: Mapping[str, CheckpointTensor],
    *,
    in_place_bytes: int = 1 << 20,
    **kwargs: Any,
) -> Skeleton:
    """Build what ``auto_class.from_pretrained(path, **kwargs)`` builds; the large weights stay in the files.

    Args:
        auto_class: an auto class of Transformers, such as ``AutoModelForCausalLM``, or a model class.
        path: the local folder of the model.
        checkpoint: the tensors of the checkpoint in that folder, by name.
        in_place_bytes: a parameter stays in the file if its tensor there has at least this many bytes.
        kwargs: as for ``from_pretrained``.

    Raises:
        ConfigError: an argument, the configuration, the folder or the state of the process excludes this way
            of loading; the message names it.
        MissingDependencyError: Transformers is not installed.
        StorageError: a tensor that is needed in memory could not be read.
    """
    transformers = _transformers()
    _refuse_arguments(kwargs)
    _refuse_process()
    folder = Path(path)
    _refuse_folder(folder)
    config, rest = _configuration(transformers, auto_class, folder, kwargs)
    _refuse_configuration(config, folder, rest)
    with _no_partitioning(transformers):
        model_class, config = _model_class(transformers, auto_class, config)
        loaded = _load_until_settled(model_class, config, checkpoint, rest)
    _name(transformers, loaded.model, folder, rest)
    return _settled(loaded, in_place_bytes)


def _load_until_settled(
    model_class: Any, config: Any, checkpoint: Mapping[str, CheckpointTensor], arguments: Mapping[str, Any]
) -> _Loaded:
    """Load until every stand-in in the model is one that nothing else was done with.

    A parameter is its tensor of the checkpoint only then: a view of the values may have been written to. Of
    other tensors the next pass gets the values from the start.
    """
    given: set[str] = set()
    while True:
        loaded = _load(model_class, config, checkpoint, given, arguments)
        written = loaded.watch.used & {stand_in.source.name for _, stand_in in _stand_ins(loaded.model)}
        if not written:
            return loaded
        logger.debug("loaded again, with the values of %s", sorted(written))
        given |= written
        del loaded


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingDependencyError(f"Transformers is not installed: {_INSTALL}") from error
    return transformers


def _refuse_arguments(kwargs: Mapping[str, Any]) -> None:
    for name, remedy in _EXCLUDED.items():
        if kwargs.get(name) not in (None, False):
            raise ConfigError(f"from_pretrained: the argument {name} excludes weights in place: {remedy}")
    if kwargs.get("use_safetensors") is False:
        raise ConfigError(f"from_pretrained: use_safetensors=False excludes weights in place: {_OTHER_FILES}")


def _refuse_process() -> None:
    if torch.get_default_device().type != "cpu":
        raise ConfigError(
            f"from_pretrained: torch's default device is {torch.get_default_device()}; the model is built on "
            f"the CPU: call it outside of torch.device(...) and before torch.set_default_device"
        )


@contextlib.contextmanager
def _no_partitioning(transformers: Any) -> Iterator[None]:
    """Keep Transformers from partitioning what it loads, as it does while an HfDeepSpeedConfig is alive.

    TrainingArguments holds one, and usually is made before the model.

    Raises:
        ConfigError: there is one, and this version of Transformers keeps it where it cannot be found.
    """
    module = transformers.integrations.deepspeed
    reference = getattr(module, "_hf_deepspeed_config_weak_ref", None)
    alive = reference() if reference is not None else None
    if alive is not None:
        module.unset_hf_deepspeed_config()
    try:
        if module.is_deepspeed_zero3_enabled():
            raise ConfigError(
                "from_pretrained: Transformers would partition the model while it loads, because an "
                "HfDeepSpeedConfig of ZeRO stage 3 is alive (TrainingArguments holds one): load the model "
                "before that is made"
            )
        yield
    finally:
        if alive is not None:
            module.set_hf_deepspeed_config(alive)


def _refuse_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"from_pretrained: {folder} is no folder; fetch the model and give its local folder"
        )
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"from_pretrained: {folder} holds an adapter (adapter_config.json): {_ADAPTED}")


def _configuration(
    transformers: Any, auto_class: Any, folder: Path, kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the model's configuration and the arguments that are not for it, as ``from_pretrained`` does."""
    rest = dict(kwargs)
    config = rest.pop("config", None)
    if isinstance(config, transformers.PreTrainedConfig):
        return config, rest
    if config is not None:
        raise ConfigError(
            f"from_pretrained: config is a {type(config).__name__}; give a PreTrainedConfig, or leave it out "
            f"for the one in {folder}"
        )
    # A dtype is for the weights; the configuration would swallow it.
    dtypes = {name: rest.pop(name) for name in ("dtype", "torch_dtype") if name in rest}
    loader = getattr(auto_class, "config_class", None) or transformers.AutoConfig
    config, rest = loader.from_pretrained(folder, return_unused_kwargs=True, **rest)
    return config, rest | dtypes


def _refuse_configuration(config: Any, folder: Path, kwargs: Mapping[str, Any]) -> None:
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            raise ConfigError(
                f"from_pretrained: {folder} is quantized (quantization_config in its configuration), and its "
                f"tensors are no weights that can be used in place: give the checkpoint that it was made from"
            )
    if kwargs.get("trust_remote_code") and getattr(config, "auto_map", None):
        raise ConfigError(
            f"from_pretrained: {folder} brings code of its own (auto_map), which is not supported: leave "
            f"trust_remote_code out if Transformers has the model itself"
        )
    named = getattr(config, "transformers_weights", None)
    others = [named] if named else [name for name in config.extra_files if (folder / name).exists()]
    if others:
        raise ConfigError(
            f"from_pretrained: {folder} keeps weights in {', '.join(others)}, which is not supported: load "
            f"it with Transformers"
        )


def _model_class(transformers: Any, auto_class: Any, config: Any) -> tuple[Any, Any]:
    """Return the class that ``auto_class`` stands for, and the part of ``config`` that is for it.

    Auto classes say so only by a model, and take no ``state_dict`` without a path.
    """
    if isinstance(auto_class, type) and issubclass(auto_class, transformers.PreTrainedModel):
        return auto_class, config
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config))
    whole = isinstance(model.config, type(config))
    return type(model), config if whole else config.get_text_config()


def _name(transformers: Any, model: Any, folder: Path, kwargs: Mapping[str, Any]) -> None:
    """Set what a load from the folder would have set, beside the weights."""
    model.name_or_path = model.config.name_or_path = str(folder)
    if not model.can_generate() or kwargs.get("generation_config") is not None:
        return
    configs = transformers.GenerationConfig
    if (folder / "generation_config.json").exists():
        model.generation_config = configs.from_pretrained(folder)
    else:
        model.generation_config = configs.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


class _Watch:
    """What happened to the stand-ins of one pass: threads of Transformers write here."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        """Tensors whose values were asked for."""
        self.error: Exception | None = None
        """The first failure to read, which Transformers reports as text only."""

    def read(self, stand_in: _StandIn) -> torch.Tensor:
        self.used.add(stand_in.source.name)
        try:
            return stand_in.values()
        except Exception as error:
            self.error = self.error or error
            raise


class _StandIn(torch.Tensor):
    """A tensor of the checkpoint without memory: it may be handed on and cast once, and stays a stand-in.

    Any other operation gets the values, read from the file, and is noted in the watch. It has no storage, so
    nothing can compute with values that are not there.
    """

    source: CheckpointTensor
    watch: _Watch

    @staticmethod
    def of(source: CheckpointTensor, dtype: torch.dtype, watch: _Watch) -> _StandIn:
        """Make a stand-in for ``source``, cast to ``dtype``."""
        made: _StandIn = torch.Tensor._make_wrapper_subclass(_StandIn, source.shape, dtype=dtype)
        made.source = source
        made.watch = watch
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Through .data a tensor is given other values, or its values to another one, without an operation.
        if func in _DATA and isinstance(args[0], _StandIn):
            args[0].watch.used.add(args[0].source.name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as no class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, _StandIn):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
                return _StandIn.of(first.source, first.dtype, first.watch)
            if func is torch.ops.aten._to_copy.default and first.can_become(**kwargs):
                return _StandIn.of(first.source, kwargs["dtype"], first.watch)
            if func is torch.ops.aten.equal.default and isinstance(args[1], _StandIn):
                return _same_values(first, args[1])
        args, kwargs = tree_map_only(_StandIn, lambda stand_in: stand_in.watch.read(stand_in), (args, kwargs))
        return func(*args, **kwargs)

    def can_become(
        self,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        memory_format: torch.memory_format = torch.preserve_format,
        **others: Any,
    ) -> bool:
        """Tell whether a copy with these properties is the tensor of the file with one cast to floating."""
        return (
            dtype in _FLOATS
            and self.dtype == self.source.dtype
            and self.source.dtype in _FLOATS
            and (device is None or device.type == "cpu")
            and memory_format == torch.preserve_format
            and not any(others.values())
        )

    def values(self) -> torch.Tensor:
        """Read the tensor, in the dtype of the stand-in."""
        return read_tensor(self.source).to(self.dtype)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Read the tensor in flat pieces that are small in memory."""
        count = self.numel()
        step = _COMPARED_BYTES // self.source.dtype.itemsize
        for start in range(0, count, step):
            offset = self.source.offset + start * self.source.dtype.itemsize
            piece = dataclasses.replace(self.source, offset=offset, shape=(min(step, count - start),))
            yield read_tensor(piece).to(self.dtype)


def _same_values(one: _StandIn, other: _StandIn) -> bool:
    """Compare as ``torch.equal`` does, without both in memory: Transformers asks before it ties parameters.

    Tensors that are not read in equal pieces are compared whole.
    """
    if one.shape != other.shape or one.source.dtype.itemsize != other.source.dtype.itemsize:
        return torch.equal(one.values(), other.values())
    return all(torch.equal(mine, its) for mine, its in zip(one.pieces(), other.pieces(), strict=True))


@dataclass(frozen=True)
class _Loaded:
    model: Any
    info: Mapping[str, Any]
    watch: _Watch = field(repr=False)


def _load(
    model_class: Any,
    config: Any,
    checkpoint: Mapping[str, CheckpointTensor],
    given: set[str],
    kwargs: Mapping[str, Any],
) -> _Loaded:
    """Let Transformers load stand-ins, and the values of the tensors named in ``given``."""
    watch = _Watch()
    # As in a load from the files: without a dtype in the configuration, that of the first tensor counts.
    ordered = sorted(checkpoint.items(), key=lambda item: (str(item[1].file.path), item[0]))
    state_dict = {
        name: read_tensor(source) if source.name in given else _StandIn.of(source, source.dtype, watch)
        for name, source in ordered
    }
    try:
        model, info = model_class.from_pretrained(
            None, config=config, state_dict=state_dict, output_loading_info=True, **kwargs
        )
    except RuntimeError as error:
        if watch.error is None or watch.error is error:
            raise
        raise watch.error from error
    return _Loaded(model, info, watch)


def _stand_ins(model: Any) -> Iterator[tuple[str, _StandIn]]:
    """Yield every name of every parameter and buffer that is a stand-in; a tied one has several names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, _StandIn):
            yield name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if isinstance(buffer, _StandIn):
            yield name, buffer


def _settled(loaded: _Loaded, in_place_bytes: int) -> Skeleton:
    """Put plain tensors in the place of the stand-ins, and say where the values of each parameter are."""
    model = loaded.model
    in_place: dict[str, CheckpointTensor] = {}
    copied: dict[str, str] = {}
    missing = set(loaded.info["missing_keys"])
    reshaped = {name for name, *_ in loaded.info["mismatched_keys"]}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, _StandIn):
            _check_memory(model, name, parameter)
            copied[name] = _NEW if name in missing else _RESHAPED if name in reshaped else _MADE
        elif _stays(parameter, in_place_bytes):
            in_place[name] = parameter.source
    for name, buffer in model.named_buffers():
        if not isinstance(buffer, _StandIn):
            _check_memory(model, name, buffer)
    plain: dict[int, torch.Tensor] = {}
    for name, stand_in in list(_stand_ins(model)):
        if id(stand_in) not in plain:
            plain[id(stand_in)] = _plain(stand_in, in_place_bytes)
            # Transformers marks what it has loaded, and initialises what bears no mark when asked to.
            plain[id(stand_in)]._is_hf_initialized = True  # type: ignore[attr-defined]
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, plain[id(stand_in)])
    return Skeleton(model, in_place, copied)


def _check_memory(model: Any, name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ConfigError(
            f"from_pretrained: {type(model).__name__} gives {name} the memory of another tensor while it "
            f"loads, which excludes weights in place: load it with Transformers"
        )


def _stays(parameter: _StandIn, in_place_bytes: int) -> bool:
    source = parameter.source
    return source.nbytes >= in_place_bytes and source.dtype in _FLOATS and parameter.dtype in _FLOATS


def _plain(stand_in: _StandIn, in_place_bytes: int) -> torch.Tensor:
    """Return what takes the place of ``stand_in``: one NaN, seen in the full shape, or else the values."""
    if not isinstance(stand_in, torch.nn.Parameter):
        return stand_in.values()
    stays = _stays(stand_in, in_place_bytes)
    nan = float("nan")
    values = torch.full((), nan, dtype=stand_in.dtype).expand(stand_in.shape) if stays else stand_in.values()
    return torch.nn.Parameter(values, requires_grad=stand_in.requires_grad)
