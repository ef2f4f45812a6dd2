# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with parameter offload is entered per layer where nothing stands against it: layer_offload.py."""

from __future__ import annotations

import atexit
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from peftds_ext.config import ParamsConfig
from peftds_ext.integrations.deepspeed.layer_offload import ZeroCoordinator, layer_offload_class
from peftds_ext.integrations.deepspeed.offload import memory_budget, offloads_parameters
from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.observe.stats import Stats
from peftds_ext.observe.trace import TraceWriter

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed._stage3_seam import Stage3Seam
else:
    Stage3Seam = object

logger = logging.getLogger("peftds_ext")


class LayerHooks(Stage3Seam):
    """Builds the object that hooks layers where DeepSpeed would build the one that hooks modules."""

    def initialize_ds_offload(self, *args: Any, **kwargs: Any) -> Any:
        """Bind our class while DeepSpeed's method looks its own up."""
        from deepspeed.runtime.zero import stage3

        reason = _why_not(kwargs)
        if reason:
            logger.info("DeepSpeed's hooks fetch parameters module by module: %s", reason)
            if isinstance(kwargs["ds_config"], dict) and read_section(kwargs["ds_config"]).trace is not None:
                logger.warning("peftds_ext.trace: nothing is traced, since %s", reason)
            return super().initialize_ds_offload(*args, **kwargs)
        stock = stage3.DeepSpeedZeRoOffload
        ours = layer_offload_class(stock)
        settings = {"peftds_budget": _budget(kwargs), "peftds_trace": _trace(kwargs)}
        stage3.DeepSpeedZeRoOffload = type("LayerOffload", (ours,), settings)
        try:
            return super().initialize_ds_offload(*args, **kwargs)
        finally:
            stage3.DeepSpeedZeRoOffload = stock

    def step(self, closure: Any = None) -> None:
        """Note when the step ends."""
        began = time.monotonic_ns()
        super().step(closure)
        coordinator = getattr(self.parameter_offload, "param_coordinator", None)
        if isinstance(coordinator, ZeroCoordinator):
            coordinator.end_step(began)


def stats(engine: Any) -> Stats:
    """Return what streaming did in the last step of a DeepSpeed engine, and in all of them together.

    Raises:
        ValueError: no layers are streamed; the message says why, or where to look.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    coordinator = getattr(offload, "param_coordinator", None)
    if not isinstance(coordinator, ZeroCoordinator):
        raise ValueError(
            "this engine streams no layers: its parameters are not offloaded under ZeRO-3, or DeepSpeed's "
            "own hooks fetch them; the log of peftds_ext says why (level INFO)"
        )
    return coordinator.stats()


def _why_not(arguments: dict[str, Any]) -> str:
    """Return why DeepSpeed's own hooks are needed, or ""."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import z3_leaf_module

    module: nn.Module = arguments["module"]
    if not isinstance(arguments["ds_config"], dict) or not offloads_parameters(arguments["ds_config"]):
        return "parameters are not offloaded"
    if not get_accelerator().is_synchronized_device():
        return "layers are fetched on the CPU accelerator only, so far"
    if arguments["zero_quantized_weights"] or arguments["zero_quantized_nontrainable_weights"]:
        return "weights are quantized"
    if arguments["zero_param_parallel_group"] is not None:
        return "there are secondary partitions (zero_hpz_partition_size)"
    if arguments["zero_module_granularity_threshold"] > 0 or any(map(z3_leaf_module, module.modules())):
        return "leaf modules are set"
    return ""


def _trace(arguments: dict[str, Any]) -> TraceWriter | None:
    """Make the file of the trace that the section asks for; at the latest it ends with the process."""
    from deepspeed import comm

    path = read_section(arguments["ds_config"]).trace
    if path is None:
        return None
    writer = TraceWriter(Path(path), rank=comm.get_rank(), world_size=comm.get_world_size())
    atexit.register(writer.close)
    return writer


def _budget(arguments: dict[str, Any]) -> int:
    """Return the bytes that may stay in memory between uses: ours, or DeepSpeed's in elements."""
    raw = arguments["ds_config"]
    params: ParamsConfig = read_section(raw).params
    if params.host_bytes is not None or params.device_bytes is not None:
        # On the CPU accelerator the device's memory is the host's.
        return (params.host_bytes or 0) + (params.device_bytes or 0)
    item_bytes = next(arguments["module"].parameters()).dtype.itemsize
    given = memory_budget(raw, item_bytes)
    return given if given is not None else int(arguments["max_reuse_distance"]) * item_bytes
