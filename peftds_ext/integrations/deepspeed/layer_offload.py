# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 entered at the borders of layers and not of modules.

DeepSpeed hooks every module, which with LoRA is some sixty per decoder layer and pass, and each hook is
Python (deepspeed/runtime/zero/parameter_offload.py, ``_register_deepspeed_module``). Here a layer's
parameters come when its forward begins and again when the gradient of its output is there; they go when its
forward has ended, and in the backward pass when another layer's turn has come: two entries a layer and pass,
and three in a backward pass with recomputation.

Why a layer may be released in the backward pass when another one's begins: autograd runs the nodes that
are ready in descending order of their creation (torch/csrc/autograd/engine.cpp, ``ReadyQueue``), so that all
nodes of a layer, which were made after the output of the one before it, have run when the gradient of that
output is taken up. A module with parameters of its own and layers inside is released after these.
DeepSpeed's hooks also split the graph at every module, which changes the order in which gradients are
summed; without them results are bit-equal to those of a model that is in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from peftds_ext.integrations.deepspeed.layer_fetch import LayerFetch
from peftds_ext.observe.stats import Stats
from peftds_ext.stream.hooks import LayerCoordinator, hook
from peftds_ext.stream.layers import Layer, find_layers


class ZeroCoordinator(LayerCoordinator):
    """Knows which layers are in use, and is what DeepSpeed takes for its coordinator of parameters.

    The methods that DeepSpeed calls from outside (deepspeed/runtime/zero/stage3.py, parameter_offload.py)
    keep their names.
    """

    def __init__(self, layers: Sequence[Layer], fetch: LayerFetch) -> None:
        super().__init__(layers, fetch)
        self.hierarchy = 0
        self._fetch = fetch

    def leave_forward(self, layer: int, outputs: Sequence[Any] = ()) -> None:
        """A layer's forward has ended with these tensors."""
        for tensor in outputs:
            if hasattr(tensor, "ds_id"):  # a parameter that is handed on, for somebody else to use
                tensor.is_external_param = True
        super().leave_forward(layer, outputs)

    def release_backward_leftovers(self) -> None:
        """Let the layers go whose backward ran last; the optimizer's step comes next."""
        was_backward = bool(self._in_backward)
        super().release_backward_leftovers()
        if was_backward:
            self._fetch.rest()

    def reset_step(self) -> None:
        """The model's forward begins; an exception in the last one may have left layers in use."""
        self.begin_pass()

    def release_and_reset_all(self, module: nn.Module) -> None:
        """Let everything go, also what was gathered by hand."""
        self.forget()
        self._fetch.release_all(module.parameters())

    def drop_copies(self) -> None:
        """Partitions may be changed behind everybody's back: let go of copies."""
        self._fetch.drop_copies()

    def wait_before_gather(self, wait: Callable[[Sequence[Any]], None]) -> None:
        """Let ``wait`` be called with the parameters that a layer is about to gather."""
        self._fetch.before_gather = wait

    def end_step(self, optimizer_began: int) -> None:
        """A step has ended, whose optimizer's part began at a time of the monotonic clock."""
        self._fetch.end_step(optimizer_began)

    def stats(self) -> Stats:
        """Return the record of the run."""
        return self._fetch.stats(self.entries)

    def close(self) -> None:
        """End what reads ahead."""
        self._fetch.close()

    def is_invalid_trace(self) -> bool:
        """Tell DeepSpeed that there is no trace that it would have to drop."""
        return True


def coordinator_of(optimizer: Any) -> ZeroCoordinator | None:
    """Return what knows the layers of an engine's optimizer, or None if DeepSpeed's own hooks are on."""
    found = getattr(getattr(optimizer, "parameter_offload", None), "param_coordinator", None)
    return found if isinstance(found, ZeroCoordinator) else None


@functools.cache
def layer_offload_class(stock: Any) -> type:
    """Return a class over DeepSpeed's ``DeepSpeedZeRoOffload`` that hooks layers."""

    class LayerOffload(stock):  # type: ignore[misc]
        """DeepSpeed's object for the parameters of ZeRO-3, with hooks at the borders of layers."""

        peftds_fetch: Callable[[Sequence[Layer]], LayerFetch]
        """Makes what brings layers; set before construction."""

        def setup_zero_stage3_hooks(self) -> None:
            self.peftds_layers = find_layers(self.module)
            fetch = self.peftds_fetch(self.peftds_layers)
            self.param_coordinator = ZeroCoordinator(self.peftds_layers, fetch)
            super().setup_zero_stage3_hooks()

        def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
            inside = set()
            for number, inner in enumerate(module.modules()):
                inner.ds_id = number  # type: ignore[assignment]
                inside.add(inner)
            for number, layer in enumerate(self.peftds_layers):
                if layer.module in inside:
                    self.forward_hooks += hook(layer, number, self.get_param_coordinator)

        def destroy(self) -> None:
            super().destroy()
            self.param_coordinator.close()
            # DeepSpeed's list of modules that are being run keeps the model, and its files, for ever.
            from deepspeed.runtime.zero import parameter_offload

            stack = parameter_offload.FWD_MODULE_STACK
            stack[:] = [module for module in stack if module is not self.module]

        def partition_all_parameters(self) -> None:
            self.param_coordinator.release_and_reset_all(self.module)

    return LayerOffload
