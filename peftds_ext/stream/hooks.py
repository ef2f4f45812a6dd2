# SPDX-License-Identifier: Apache-2.0
"""A model entered at the borders of its layers and not of its modules.

A layer's parameters come when its forward begins and again when the gradient of its output is there; they
go when its forward has ended, and in the backward pass when another layer's turn has come: two entries a
layer and pass, and three in a backward pass with recomputation.

Why a layer may be released in the backward pass when another one's begins: autograd runs the nodes that
are ready in descending order of their creation (torch/csrc/autograd/engine.cpp, ``ReadyQueue``), so that all
nodes of a layer, which were made after the output of the one before it, have run when the gradient of that
output is taken up. A module with parameters of its own and layers inside is released after these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from peftds_ext.stream.layers import Layer


class LayerOwner(Protocol):
    """Who has the parameters of layers, which are numbers here."""

    def use(self, layer: int, *, backward: bool) -> None:
        """Make a layer's parameters available; also when they are already."""

    def release(self, layer: int) -> None:
        """A use has ended, or several together; also of a layer that failed to become available."""

    def begin_pass(self) -> None:
        """The model's forward begins."""

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""


class LayerCoordinator:
    """Knows which layers are in use."""

    def __init__(self, layers: Sequence[Layer], owner: LayerOwner) -> None:
        self.entries = 0
        """Calls from the layers into this object so far."""
        self._owner = owner
        self._in_forward: list[int] = []
        self._in_backward: list[int] = []
        self._inside = [_layers_inside(layer, layers) for layer in layers]

    @torch.no_grad()
    def enter_forward(self, layer: int) -> None:
        """A layer's forward begins, or its recomputation does."""
        self.entries += 1
        if _backward_is_running():
            self._enter_backward(layer)
            return
        if not self._in_forward and self._owner.begins_again(layer):
            self._owner.begin_pass()  # somebody calls an inner model, whose forward nobody announces
        self._in_forward.append(layer)
        self._owner.use(layer, backward=False)

    @torch.no_grad()
    def leave_forward(self, layer: int, outputs: Sequence[Tensor] = ()) -> None:
        """A layer's forward has ended with these tensors; after a recomputation its backward follows at once.

        Nothing is done with the tensors here: they are for those that must know what was handed on.
        """
        self.entries += 1
        if layer in self._in_forward and not _backward_is_running():
            self._in_forward.remove(layer)
            if layer not in self._in_forward:
                self._owner.release(layer)

    @torch.no_grad()
    def enter_backward(self, layer: int) -> None:
        """The gradient of a layer's output is there."""
        self.entries += 1
        self._enter_backward(layer)

    def _enter_backward(self, layer: int) -> None:
        for other in [other for other in self._in_backward if other != layer]:
            if layer not in self._inside[other]:  # else nodes of the outer one come after those of the inner
                self._in_backward.remove(other)
                self._owner.release(other)
        if layer not in self._in_backward:
            self._in_backward.append(layer)
        self._owner.use(layer, backward=True)

    def begin_pass(self) -> None:
        """The model's forward begins; an exception in the last one may have left layers in use."""
        self.release_backward_leftovers()
        for layer in dict.fromkeys(self._in_forward):
            self._owner.release(layer)
        self._in_forward.clear()
        self._owner.begin_pass()

    def release_backward_leftovers(self) -> None:
        """Let the layers go whose backward ran last."""
        while self._in_backward:
            self._owner.release(self._in_backward.pop())

    def forget(self) -> None:
        """No layer is in use any more, and the owner knows."""
        self._in_backward.clear()
        self._in_forward.clear()


def hook(layer: Layer, number: int, coordinator: Callable[[], LayerCoordinator]) -> list[Any]:
    """Let a layer's forward, and the gradients of its outputs, enter the coordinator; returns the hooks."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: Any, inputs: Any) -> None:
        coordinator().enter_forward(number)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(module: Any, inputs: Any, output: Any) -> None:
        outputs: list[Any] = list(tensors_in(output))
        coordinator().leave_forward(number, outputs)
        _on_gradient(outputs, lambda: coordinator().enter_backward(number))

    return [
        layer.module.register_forward_pre_hook(before),
        layer.module.register_forward_hook(after, always_call=True),
    ]


def _on_gradient(outputs: list[Any], call: Callable[[], None]) -> None:
    """Let ``call`` run once in each backward pass, when the first gradient of the outputs is there.

    A leaf has no nodes before it, and so nothing of the layer is needed for its gradient.
    """
    tensors = [tensor for tensor in outputs if tensor.grad_fn is not None]
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    tensors = on_device or tensors  # each device has a queue of its own, and weights are used in one
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
