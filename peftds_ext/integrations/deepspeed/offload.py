# SPDX-License-Identifier: Apache-2.0
"""What a raw DeepSpeed configuration says about offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def offloads_optimizer(raw: Mapping[str, Any]) -> bool:
    """Whether the DeepSpeed configuration keeps optimizer states off the accelerator."""
    zero = raw.get("zero_optimization")
    if not isinstance(zero, Mapping) or not zero.get("stage"):
        return False
    offload = zero.get("offload_optimizer")
    device = offload.get("device", "none") if isinstance(offload, Mapping) else "none"
    return bool(zero.get("cpu_offload")) or str(device) in ("cpu", "nvme")
