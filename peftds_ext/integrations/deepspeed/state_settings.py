# SPDX-License-Identifier: Apache-2.0
"""What the configuration asks for of optimizer states, and what of that cannot be; needs no compiled core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peftds_ext.config import SECTION, OptimizerConfig
from peftds_ext.errors import ConfigError
from peftds_ext.integrations.deepspeed.offload import (
    OPTIMIZER_NVME_PATH,
    offloads_optimizer_to_nvme,
    optimizer_nvme_path,
)


def wants_compact(config: OptimizerConfig) -> bool:
    """Whether the configuration asks for anything else than fp32 masters and moments."""
    return (config.states or "fp32") != "fp32" or config.master == "split"


def refuse_compact(config: OptimizerConfig, reason: str) -> None:
    """Raise if the configuration asks for a form that cannot be had.

    Raises:
        ConfigError: it does; the message names the key and the reason.
    """
    if wants_compact(config):
        key = "states" if (config.states or "fp32") != "fp32" else "master"
        raise ConfigError(
            f"{SECTION}.optimizer.{key}: {getattr(config, key)!r} cannot be had here, since {reason}; leave "
            "the key out"
        )


def check_optimizer_nvme_path(raw: Mapping[str, Any]) -> None:
    """Say what is missing before DeepSpeed stumbles over it.

    Raises:
        ConfigError: optimizer states are to be on NVMe, and no folder is given.
    """
    if offloads_optimizer_to_nvme(raw) and not optimizer_nvme_path(raw):
        raise ConfigError(
            f'{OPTIMIZER_NVME_PATH}: missing. "device" is "nvme", so give a folder on the disk that '
            'optimizer states are to be on, such as "/local_nvme"'
        )
