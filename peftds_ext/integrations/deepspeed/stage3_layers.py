# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with parameter offload is entered per layer where nothing stands against it: layer_offload.py."""

from __future__ import annotations

import atexit
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from peftds_ext.config import ParamsConfig
from peftds_ext.integrations.deepspeed import accelerator
from peftds_ext.integrations.deepspeed.layer_fetch import LayerFetch
from peftds_ext.integrations.deepspeed.layer_offload import coordinator_of, layer_offload_class
from peftds_ext.integrations.deepspeed.layer_upload import LayerUpload
from peftds_ext.integrations.deepspeed.offload import memory_budget, offloads_parameters
from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.observe.stats import Stats, StepStats, pinned_bytes
from peftds_ext.observe.trace import TraceWriter
from peftds_ext.stream.layers import Layer
from peftds_ext.stream.recorder import Recorder

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

        self._peftds_config = kwargs["ds_config"] if isinstance(kwargs["ds_config"], dict) else {}
        reason = _why_not(kwargs)
        if reason:
            logger.info("DeepSpeed's hooks fetch parameters module by module: %s", reason)
            if isinstance(kwargs["ds_config"], dict) and read_section(kwargs["ds_config"]).trace is not None:
                logger.warning("peftds_ext.trace: nothing is traced, since %s", reason)
            return super().initialize_ds_offload(*args, **kwargs)
        stock = stage3.DeepSpeedZeRoOffload
        ours = layer_offload_class(stock)
        fetch = staticmethod(_how_to_fetch(kwargs))
        stage3.DeepSpeedZeRoOffload = type("LayerOffload", (ours,), {"peftds_fetch": fetch})
        try:
            return super().initialize_ds_offload(*args, **kwargs)
        finally:
            stage3.DeepSpeedZeRoOffload = stock

    def checkpoint_event_prologue(self) -> None:
        """Let go of copies: a load writes into the partitions of frozen parameters, and tells nobody."""
        super().checkpoint_event_prologue()
        coordinator = coordinator_of(self)
        if coordinator is not None:
            coordinator.drop_copies()

    def step(self, closure: Any = None) -> None:
        """Note when the step ends."""
        began = time.monotonic_ns()
        super().step(closure)
        coordinator = coordinator_of(self)
        if coordinator is not None:
            coordinator.end_step(began)


def stats(engine: Any) -> Stats:
    """Return what streaming and stored states did in the last step of an engine, and in all of them together.

    Raises:
        ValueError: neither layers are streamed nor states stored; the message says why, or where to look.
    """
    optimizer = getattr(engine, "optimizer", None)
    coordinator = coordinator_of(optimizer)
    states = getattr(optimizer, "_peftds_states", None)
    if coordinator is None and states is None:
        raise ValueError(
            "this engine streams no layers and stores no states: its parameters are not offloaded under "
            "ZeRO-3, or DeepSpeed's own hooks fetch them, and its optimizer states are as DeepSpeed has "
            "them; the log of peftds_ext says why (level INFO)"
        )
    found = coordinator.stats() if coordinator is not None else _nothing_streamed()
    return found if states is None else found.model_copy(update={"optimizer": states.stats()})


def _nothing_streamed() -> Stats:
    none = StepStats(
        seconds=0,
        compute_waited_seconds=0,
        layers_used=0,
        layers_resident=0,
        layers_ready=0,
        layers_waited_for=0,
    )
    return Stats(
        last_step=None,
        run=none,
        steps=0,
        host_bytes_held=0,
        host_bytes_peak=0,
        pinned_bytes=pinned_bytes(),
        python_entries=0,
    )


def _why_not(arguments: dict[str, Any]) -> str:
    """Return why DeepSpeed's own hooks are needed, or ""."""
    from deepspeed.utils import z3_leaf_module

    module: nn.Module = arguments["module"]
    if not isinstance(arguments["ds_config"], dict) or not offloads_parameters(arguments["ds_config"]):
        return "parameters are not offloaded"
    if reason := accelerator.why_no_layers():
        return reason
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


def drop_copies_before_loads(engine: Any) -> None:
    """Let an engine's method that loads weights find no copies of them, which it would load into."""
    stock = engine.load_module_state_dict

    @functools.wraps(stock)
    def load_module_state_dict(*args: Any, **kwargs: Any) -> Any:
        coordinator = coordinator_of(engine.optimizer)
        if coordinator is not None:
            coordinator.drop_copies()
        return stock(*args, **kwargs)

    engine.load_module_state_dict = load_module_state_dict


def _how_to_fetch(arguments: dict[str, Any]) -> Callable[[Sequence[Layer]], LayerFetch]:
    """Return what makes the object that brings layers to where they compute."""
    device, trace = accelerator.layer_device(), _trace(arguments)
    host_budget, device_budget = _budgets(arguments)
    if device is None:  # there the device's memory is the host's
        budget = host_budget + (device_budget or 0)
        return lambda layers: LayerFetch(layers, budget, _recorder(layers, trace))
    if device_budget is None:
        device_budget = _reuse(arguments, "max_live_parameters")
    on_device = functools.partial(
        LayerUpload, device=device, device_budget=device_budget, page_lock=accelerator.page_lock()
    )
    return lambda layers: on_device(layers, host_budget, _recorder(layers, trace))


def _recorder(layers: Sequence[Layer], trace: TraceWriter | None) -> Recorder:
    return Recorder([layer.name for layer in layers], trace, accelerator.profiler_ranges())


def _budgets(arguments: dict[str, Any]) -> tuple[int, int | None]:
    """Return the bytes that may stay in host memory and on the device between uses, ours or DeepSpeed's."""
    raw = arguments["ds_config"]
    params: ParamsConfig = read_section(raw).params
    if params.host_bytes is not None or params.device_bytes is not None:
        return params.host_bytes or 0, params.device_bytes
    given = memory_budget(raw, _item_bytes(arguments))
    return given if given is not None else _reuse(arguments), None


def _reuse(arguments: dict[str, Any], *bounds: str) -> int:
    """Return DeepSpeed's distance of reuse, within other bounds that it has in elements, in bytes."""
    return min(int(arguments[name]) for name in ("max_reuse_distance", *bounds)) * _item_bytes(arguments)


def _item_bytes(arguments: dict[str, Any]) -> int:
    parameter: nn.Parameter = next(arguments["module"].parameters())
    return parameter.dtype.itemsize
