# SPDX-License-Identifier: Apache-2.0
"""Puts our parameter swapper where ``deepspeed.zero.Init`` looks its own up by name.

This is in force from ``install()`` on and not only during ``deepspeed.initialize``, since a model that is
made under ``zero.Init`` (Transformers' ``from_pretrained`` does so) is on the disk before that.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from peftds_ext.config import SECTION
from peftds_ext.errors import ConfigError
from peftds_ext.integrations.deepspeed.offload import NVME_PATH, nvme_path, offloads_parameters_to_nvme
from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.integrations.deepspeed.switch import wants_engine


class SwapperSeam:
    """What is bound in ``deepspeed.runtime.zero.partition_parameters``, and how to undo it."""

    def __init__(self) -> None:
        from deepspeed.runtime.zero import partition_parameters

        self._module = partition_parameters
        self._stock_swapper = partition_parameters.AsyncPartitionedParameterSwapper
        self._stock_check = partition_parameters.Init._validate_remote_device
        partition_parameters.AsyncPartitionedParameterSwapper = _choose(self._stock_swapper)
        partition_parameters.Init._validate_remote_device = _check_before(self._stock_check)

    def undo(self) -> None:
        """Bind DeepSpeed's own again. Swappers that exist keep working."""
        self._module.AsyncPartitionedParameterSwapper = self._stock_swapper
        self._module.Init._validate_remote_device = self._stock_check


def check_nvme_path(raw: Mapping[str, Any]) -> None:
    """Say what is missing before DeepSpeed's bare assertion does.

    Raises:
        ConfigError: parameters are to be on NVMe, and no folder is given.
    """
    if offloads_parameters_to_nvme(raw) and not nvme_path(raw):
        raise ConfigError(
            f'{NVME_PATH}: missing. "device" is "nvme", so give a folder on the disk that parameters are to '
            'be on, such as "/local_nvme"'
        )


def check_source(raw: Mapping[str, Any], model: Any) -> None:
    """Refuse a model that is not in place where the configuration says that it is.

    Raises:
        ConfigError: it was not made by ``peftds_ext.from_pretrained``.
    """
    if read_section(raw).params.source != "checkpoint" or not isinstance(model, nn.Module):
        return
    if not any(hasattr(module, "peftds_placement") for module in model.modules()):
        raise ConfigError(
            f'{SECTION}.params.source: "checkpoint" needs a model that peftds_ext.from_pretrained(...) made; '
            "make it so, or leave the key out"
        )


def _choose(stock: Any) -> Any:
    """Return what makes our swapper where the engine is on, and DeepSpeed's elsewhere."""

    def make(ds_config: Any, model_dtype: Any) -> Any:
        from peftds_ext.integrations.deepspeed.param_swapper import ParameterSwapper

        ours = wants_engine(ds_config._param_dict)
        return (ParameterSwapper if ours else stock)(ds_config, model_dtype)

    return make


def _check_before(stock: Any) -> Any:
    @functools.wraps(stock)
    def validate(self: Any, remote_device: Any, ds_config: Any) -> None:
        if ds_config is not None and wants_engine(ds_config._param_dict):
            check_nvme_path(ds_config._param_dict)
        stock(self, remote_device, ds_config)

    return validate
