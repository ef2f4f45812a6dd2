# SPDX-License-Identifier: Apache-2.0
"""What a raw DeepSpeed configuration says about offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from peftds_ext.errors import ConfigError

NVME_PATH: Final = "zero_optimization.offload_param.nvme_path"
OPTIMIZER_NVME_PATH: Final = "zero_optimization.offload_optimizer.nvme_path"
_BUFFERS: Final = {"buffer_count": 5, "buffer_size": 1e8}


def offloads_optimizer(raw: Mapping[str, Any]) -> bool:
    """Whether the DeepSpeed configuration keeps optimizer states off the accelerator."""
    zero = raw.get("zero_optimization")
    if not isinstance(zero, Mapping) or not zero.get("stage"):
        return False
    device = _offload_optimizer(raw).get("device", "none")
    return bool(zero.get("cpu_offload")) or str(device) in ("cpu", "nvme")


def offloads_optimizer_to_nvme(raw: Mapping[str, Any]) -> bool:
    """Whether the DeepSpeed configuration keeps optimizer states on NVMe."""
    return str(_offload_optimizer(raw).get("device", "none")) == "nvme"


def optimizer_nvme_path(raw: Mapping[str, Any]) -> str | None:
    """Return the folder for optimizer states on NVMe, as the user wrote it."""
    return _offload_optimizer(raw).get("nvme_path")


def offloads_parameters_to_nvme(raw: Mapping[str, Any]) -> bool:
    """Whether the DeepSpeed configuration keeps ZeRO-3 parameters on NVMe."""
    return str(_offload_param(raw).get("device", "none")) == "nvme"


def nvme_path(raw: Mapping[str, Any]) -> str | None:
    """Return the folder for parameters on NVMe, as the user wrote it."""
    return _offload_param(raw).get("nvme_path")


def offloads_parameters(raw: Mapping[str, Any]) -> bool:
    """Whether the DeepSpeed configuration keeps ZeRO-3 parameters in host memory or on NVMe."""
    return str(_offload_param(raw).get("device", "none")) in ("cpu", "nvme")


def memory_budget(raw: Mapping[str, Any], item_bytes: int) -> int | None:
    """Return the bytes of host memory that ``buffer_count`` buffers of ``buffer_size`` elements take.

    None where the user gave neither, or the word "auto". What one of them leaves out is DeepSpeed's default
    (deepspeed/runtime/zero/offload_config.py).

    Raises:
        ConfigError: one of them is not a number.
    """
    offload = _offload_param(raw)
    given = {key: offload[key] for key in _BUFFERS if offload.get(key, "auto") != "auto"}
    if not given:
        return None
    try:
        count, size = (int(float(given.get(key, default))) for key, default in _BUFFERS.items())
    except (TypeError, ValueError):
        raise ConfigError(
            f"zero_optimization.offload_param: {given} are no numbers of buffers and elements"
        ) from None
    return count * size * item_bytes


def _offload_optimizer(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = raw.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, Mapping) and zero.get("stage") else None
    return offload if isinstance(offload, Mapping) else {}


def _offload_param(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = raw.get("zero_optimization")
    offload = zero.get("offload_param") if isinstance(zero, Mapping) and zero.get("stage") == 3 else None
    return offload if isinstance(offload, Mapping) else {}
