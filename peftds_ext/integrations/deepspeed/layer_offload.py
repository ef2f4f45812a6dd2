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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftds_ext.integrations.deepspeed.layer_fetch import LayerFetch
from peftds_ext.observe.stats import Stats
from peftds_ext.observe.trace import TraceWriter
from peftds_ext.stream.layers import Layer, find_layers
from peftds_ext.stream.recorder import Recorder


class LayerCoordinator:
    """Knows which layers are in use.

    The methods that DeepSpeed calls from outside (deepspeed/runtime/zero/stage3.py, parameter_offload.py)
    keep their names.
    """

    def __init__(self, layers: Sequence[Layer], fetch: LayerFetch) -> None:
        self.hierarchy = 0
        self.entries = 0
        """Calls from the model into this object so far."""
        self._fetch = fetch
        self._in_forward: list[int] = []
        self._in_backward: list[int] = []
        self._inside = [_layers_inside(layer, layers) for layer in layers]

    # -- from the model ---------------------------------------------------------------------------------

    @torch.no_grad()
    def enter_forward(self, layer: int) -> None:
        """A layer's forward begins, or its recomputation does."""
        self.entries += 1
        if _backward_is_running():
            self._enter_backward(layer)
            return
        if not self._in_forward and self._fetch.begins_again(layer):
            self._fetch.begin_pass()  # generate() calls an inner model, whose forward DeepSpeed does not see
        self._in_forward.append(layer)
        self._fetch.use(layer, backward=False)

    @torch.no_grad()
    def leave_forward(self, layer: int) -> None:
        """A layer's forward has ended; after a recomputation its backward follows at once."""
        self.entries += 1
        if layer in self._in_forward and not _backward_is_running():
            self._in_forward.remove(layer)
            if layer not in self._in_forward:
                self._fetch.release(layer)

    @torch.no_grad()
    def enter_backward(self, layer: int) -> None:
        """The gradient of a layer's output is there."""
        self.entries += 1
        self._enter_backward(layer)

    def _enter_backward(self, layer: int) -> None:
        for other in [other for other in self._in_backward if other != layer]:
            if layer not in self._inside[other]:  # else nodes of the outer one come after those of the inner
                self._in_backward.remove(other)
                self._fetch.release(other)
        if layer not in self._in_backward:
            self._in_backward.append(layer)
        self._fetch.use(layer, backward=True)

    # -- from DeepSpeed ---------------------------------------------------------------------------------

    def reset_step(self) -> None:
        """The model's forward begins; an exception in the last one may have left layers in use."""
        self.release_backward_leftovers()
        for layer in dict.fromkeys(self._in_forward):
            self._fetch.release(layer)
        self._in_forward.clear()
        self._fetch.begin_pass()

    def release_backward_leftovers(self) -> None:
        """Let the layers go whose backward ran last."""
        while self._in_backward:
            self._fetch.release(self._in_backward.pop())

    def release_and_reset_all(self, module: nn.Module) -> None:
        """Let everything go, also what was gathered by hand."""
        self._in_backward.clear()
        self._in_forward.clear()
        self._fetch.release_all(module.parameters())

    # -- from the optimizer and from users ------------------------------------------------------------

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


@functools.cache
def layer_offload_class(stock: Any) -> type:
    """Return a class over DeepSpeed's ``DeepSpeedZeRoOffload`` that hooks layers."""

    class LayerOffload(stock):  # type: ignore[misc]
        """DeepSpeed's object for the parameters of ZeRO-3, with hooks at the borders of layers."""

        peftds_budget = 0
        """Bytes of partitions that may stay in memory between their uses; set before construction."""
        peftds_trace: TraceWriter | None = None
        """Where uses and transfers are traced; set before construction."""

        def setup_zero_stage3_hooks(self) -> None:
            self.peftds_layers = find_layers(self.module)
            recorder = Recorder([layer.name for layer in self.peftds_layers], self.peftds_trace)
            fetch = LayerFetch(self.peftds_layers, self.peftds_budget, recorder)
            self.param_coordinator = LayerCoordinator(self.peftds_layers, fetch)
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


def hook(layer: Layer, number: int, coordinator: Callable[[], LayerCoordinator]) -> list[Any]:
    """Let a layer's forward, and the gradients of its outputs, enter the coordinator; returns the hooks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: nn.Module, inputs: Any) -> None:
        coordinator().enter_forward(number)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs: list[Any] = list(tensors_in(output))
        for tensor in outputs:
            if hasattr(tensor, "ds_id"):  # a parameter that is handed on, for somebody else to use
                tensor.is_external_param = True
        coordinator().leave_forward(number)
        _on_gradient(outputs, lambda: coordinator().enter_backward(number))

    return [layer.module.register_forward_pre_hook(before), layer.module.register_forward_hook(after)]


def _on_gradient(outputs: list[Any], call: Callable[[], None]) -> None:
    """Let ``call`` run once in each backward pass, when the first gradient of the outputs is there.

    A leaf has no nodes before it, and so nothing of the layer is needed for its gradient.
    """
    tensors = [tensor for tensor in outputs if tensor.grad_fn is not None]
    if len(tensors) == 1:
        tensors[0].register_hook(lambda gradient: call())
    elif tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda gradient: call(), mode="any")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, and in an object's attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _in_each(value.values())
    elif isinstance(value, tuple | list):
        yield from _in_each(value)
    elif hasattr(value, "__dict__"):
        yield from _in_each(vars(value).values())


def _in_each(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor | dict | tuple | list):
            yield from tensors_in(value)


def _layers_inside(outer: Layer, layers: Sequence[Layer]) -> frozenset[int]:
    """Return the layers whose modules are inside the module of another one."""
    modules = set(outer.module.modules()) - {outer.module}
    return frozenset(number for number, layer in enumerate(layers) if layer.module in modules)


def _backward_is_running() -> bool:
    return torch._C._current_graph_task_id() != -1
