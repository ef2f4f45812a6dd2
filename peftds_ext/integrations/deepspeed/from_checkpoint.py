# SPDX-License-Identifier: Apache-2.0
"""Models for ZeRO-3 whose weights are read in place from the safetensors files that they came in.

``deepspeed.zero.Init`` partitions a model that is in memory, and its NVMe offload writes each partition to
a file first. Here a partition is bound to its bytes in the checkpoint: rank r of N reads its part of each
tensor from there, nothing is copied, and nothing is written.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peftds_ext.config import SECTION, PeftdsConfig
from peftds_ext.errors import ConfigError
from peftds_ext.integrations.deepspeed.offload import NVME_PATH, offloads_parameters_to_nvme
from peftds_ext.integrations.deepspeed.plug import install
from peftds_ext.integrations.deepspeed.section import load_config, read_section
from peftds_ext.integrations.transformers import load_skeleton
from peftds_ext.store.checkpoint import CheckpointTensor, check_header, read_checkpoint, read_tensor
from peftds_ext.store.records import Source, can_lie_in_place

logger = logging.getLogger("peftds_ext")


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model from :func:`from_pretrained` are; its attribute ``peftds_placement``."""

    in_place: Mapping[str, str]
    """Parameter name to the file that it is read from."""
    copied: Mapping[str, str]
    """Parameter name to the reason why it is not read in place."""
    in_place_bytes: int
    """Bytes in the files of what is read in place, by all ranks together."""


def from_pretrained(auto_class: Any, path: str | Path, *, config: Any, **kwargs: Any) -> Any:
    """Build a model for ZeRO-3 with its weights bound in place to their safetensors files.

    Use it in the place of ``auto_class.from_pretrained(path, **kwargs)``, and hand the model on to PEFT and
    to ``deepspeed.initialize`` or the Trainer as usual. Switches the engine on as ``install()`` does.

    Args:
        auto_class: an auto class of Transformers, such as ``AutoModelForCausalLM``, or a model class.
        path: the local folder of the model.
        config: the DeepSpeed configuration, as for ``deepspeed.initialize``: ZeRO stage 3 with
            ``offload_param.device: "nvme"`` and our section enabled. What cannot be used in place, and
            trainable weights, go to its ``nvme_path``. With the Trainer, whose configuration may say
            ``"auto"``: ``training_arguments.hf_deepspeed_config``.
        kwargs: as for ``from_pretrained``; ``model_config`` is its ``config``. ``dtype`` is that of the
            DeepSpeed configuration (``bf16``, ``fp16``, else fp32) unless given.

    Raises:
        ConfigError: the configuration or an argument excludes weights in place; the message names it.
        CheckpointError: a file of the checkpoint is damaged or missing.
        StorageError: a file or folder cannot be used.
        UnsupportedVersionError: this DeepSpeed is not one that the engine knows.
    """
    raw = load_config(None, getattr(config, "config", config), None)
    if raw is None:
        raise ConfigError(f"from_pretrained: config is no DeepSpeed configuration or file: {config!r}")
    section = read_section(raw)
    _check(raw, section)
    install()
    if "model_config" in kwargs:
        kwargs["config"] = kwargs.pop("model_config")
    if "torch_dtype" in kwargs:  # its former name
        kwargs["dtype"] = kwargs.pop("torch_dtype")
    kwargs.setdefault("dtype", _dtype(raw))
    checkpoint = read_checkpoint(Path(path))
    skeleton = load_skeleton(auto_class, path, checkpoint, **kwargs)
    tensors = {
        parameter: skeleton.in_place[name]
        for name, parameter in skeleton.model.named_parameters()
        if name in skeleton.in_place
    }
    in_memory = _partition(skeleton.model, tensors, raw, section)
    copied = {**skeleton.copied, **{name: reason for name, reason in in_memory.items() if reason}}
    in_place = {name: tensor for name, tensor in skeleton.in_place.items() if name not in in_memory}
    skeleton.model.peftds_placement = Placement(
        {name: str(tensor.file.path) for name, tensor in in_place.items()},
        copied,
        sum(tensor.nbytes for tensor in in_place.values()),
    )
    _report(Path(path), skeleton.model.peftds_placement)
    return skeleton.model


def _check(raw: Mapping[str, Any], section: PeftdsConfig) -> None:
    if not section.enabled:
        raise ConfigError(
            f"{SECTION}.enabled: must be true for weights in place; set it, or use Transformers"
        )
    if section.params.source == "store":
        raise ConfigError(
            f'{SECTION}.params.source: "store" copies the weights; leave it out, or load with Transformers'
        )
    zero = raw.get("zero_optimization")
    if not isinstance(zero, Mapping) or zero.get("stage") != 3 or not offloads_parameters_to_nvme(raw):
        raise ConfigError(
            'zero_optimization: weights in place need stage 3 and offload_param.device "nvme", with '
            f"{NVME_PATH} for what cannot be in place"
        )


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that DeepSpeed gives the weights of this configuration."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = raw.get(key)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return torch.float32


def _partition(
    model: Any, tensors: Mapping[Any, CheckpointTensor], raw: dict[str, Any], section: PeftdsConfig
) -> dict[str, str]:
    """Hand the model over to ZeRO-3; returns the parameters that are in memory after all, and why.

    There is no reason to give for one whose parts are too small to be worth a read.
    """
    from deepspeed import zero

    in_place = section.model_copy(
        update={"params": section.params.model_copy(update={"source": "checkpoint"})}
    )
    own = {**raw, SECTION: in_place.model_dump(mode="json", exclude_unset=True) | {"enabled": True}}
    names = {parameter: name for name, parameter in model.named_parameters()}
    reasons: dict[str, str] = {}

    def refuse(parameter: Any, reason: str) -> None:
        reasons[names[parameter]] = reason

    _init_class(zero.Init)(module=model, config_dict_or_path=own, peftds_in_place=(tensors, refuse))
    return reasons


@functools.cache
def _init_class(stock: Any) -> Any:
    class InPlaceInit(stock):  # type: ignore[misc]
        """``zero.Init`` that binds parameters to the files they are in."""

        def __init__(self, *args: Any, peftds_in_place: Any, **kwargs: Any) -> None:
            self._peftds_tensors, self._peftds_refuse = peftds_in_place
            self._peftds_files: dict[Path, Any] = {}
            super().__init__(*args, **kwargs)
            for buffer in kwargs["module"].buffers():  # DeepSpeed moves parameters, and leaves these
                buffer.data = buffer.data.to(self.local_device)
            del self._peftds_tensors, self._peftds_refuse, self._peftds_files

        def _convert_to_zero_parameters(self, param_list: Iterable[Any]) -> None:
            params = list(param_list)
            tensors = self.__dict__.get(
                "_peftds_tensors", {}
            )  # DeepSpeed calls it for adapters as well, later
            for param in params:
                tensor = tensors.get(param)
                if tensor is None:
                    super()._convert_to_zero_parameters([param])
                    continue
                reason = can_lie_in_place(tensor.dtype, param.dtype, tensor.offset)
                if reason or not self._peftds_bind(param, tensor):
                    self._peftds_refuse(param, reason)
                    param.data = read_tensor(tensor).to(param.dtype)
                    super()._convert_to_zero_parameters([param])

        def _peftds_bind(self, param: Any, tensor: CheckpointTensor) -> bool:
            """Make a parameter a ZeRO parameter whose partition is on the disk, if that is large enough.

            What is set is what ``_partition_param`` sets (deepspeed/runtime/zero/partition_parameters.py).
            """
            from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
            from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
            from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

            numel = -(-param.numel() // self.dp_world_size)
            if not self.param_swapper.swappable_tensor(numel=numel):
                return False
            self._convert_to_deepspeed_param(param)
            aligned = self._aligned_size(param)
            size = aligned // self._partition_world_size(param)
            start = min(size * self._partition_rank(param), param.ds_numel)
            partition = torch.empty(0, dtype=param.dtype)
            partition.ds_numel = size  # type: ignore[attr-defined]
            partition.status = PartitionedParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
            partition.final_location = OffloadDeviceEnum.nvme  # type: ignore[attr-defined]
            param.ds_tensor, param.ds_numel_aligned = partition, aligned
            self.param_swapper.bind(
                param,
                Source(
                    file=self._peftds_file(tensor),
                    offset=tensor.offset + start * tensor.dtype.itemsize,
                    stored=tensor.dtype,
                    dtype=param.dtype,
                    numel=min(size, param.ds_numel - start),
                    room=size,
                    read_only=True,
                ),
            )
            param.data = torch.empty(0, dtype=param.dtype, device=self.local_device)
            param.ds_status = ZeroParamStatus.NOT_AVAILABLE
            return True

        def _peftds_file(self, tensor: CheckpointTensor) -> Any:
            path = tensor.file.path
            if path not in self._peftds_files:
                file = self.param_swapper.engine.open_file(path)
                check_header(tensor.file, file.descriptor)
                self._peftds_files[path] = file
            return self._peftds_files[path]

    return InPlaceInit


def _report(path: Path, placement: Placement) -> None:
    logger.info(
        "%s: %d parameters (%.1f MB) are read in place from %d files",
        path,
        len(placement.in_place),
        placement.in_place_bytes / 1e6,
        len(set(placement.in_place.values())),
    )
    for reason, count in Counter(placement.copied.values()).most_common():
        names = [name for name, other in placement.copied.items() if other == reason]
        logger.info(
            "%d parameters are copied: %s: %s%s",
            count,
            reason,
            ", ".join(names[:3]),
            ", ..." if count > 3 else "",
        )
