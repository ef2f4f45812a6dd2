# SPDX-License-Identifier: Apache-2.0
"""Where layers compute: in host memory, or on a GPU that they are copied to."""

from __future__ import annotations

import logging

import torch

from peftds_ext import _native
from peftds_ext.stream.device import AcceleratorDevice, Device
from peftds_ext.stream.recorder import ProfilerRanges

logger = logging.getLogger("peftds_ext")


def why_no_layers() -> str:
    """Return why layers cannot be brought to DeepSpeed's accelerator, or ""."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.is_synchronized_device() or accelerator.device_name() == "cuda":
        return ""
    return f"layers compute on CPUs and CUDA GPUs only, not on {accelerator.device_name()}"


def layer_device() -> Device | None:
    """Return what copies layers to this process's GPU, or None where they compute in host memory."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    return AcceleratorDevice(torch.device(accelerator.current_device_name()))


def profiler_ranges() -> ProfilerRanges | None:
    """Return where a profiler of this process's GPU is shown what is done: NVTX."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_synchronized_device():
        return None
    import torch.cuda.nvtx

    ranges: ProfilerRanges = torch.cuda.nvtx
    try:
        ranges.range_end(ranges.range_start("peftds_ext"))
    except RuntimeError as error:
        logger.info("no ranges for a profiler: this torch has no NVTX (%s)", error)
        return None
    return ranges


def page_lock() -> object | None:
    """Return how host memory is locked for copies to this process's GPU; None where there are none."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_synchronized_device():
        return None
    loaded, reason = _native.cuda_status()
    if not loaded:
        logger.warning("host memory of layers is not page-locked, which makes copies slow: %s", reason)
        return None
    return _native.cuda_page_lock()
