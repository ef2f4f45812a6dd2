# SPDX-License-Identifier: Apache-2.0
"""A plain torch module whose frozen parameters stay in files and are in memory only around their use.

On a GPU they come through host memory, from which they are copied ahead of their use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peftds_ext.store.engine import StorageEngine
from peftds_ext.store.records import Records, Source
from peftds_ext.store.swap_file import SwapFile
from peftds_ext.stream.device import AcceleratorDevice, Device
from peftds_ext.stream.emptied import empty, is_empty, shape_of
from peftds_ext.stream.hooks import LayerCoordinator, hook
from peftds_ext.stream.host import ReadLayers
from peftds_ext.stream.layers import find_layers
from peftds_ext.stream.linear import hold_no_weights, restore
from peftds_ext.stream.pipeline import Pipeline
from peftds_ext.stream.uploads import Uploads


class _Streamed(NamedTuple):
    """What a parameter is when it is in memory."""

    name: str
    source: Source
    shape: torch.Size


class ModuleStream:
    """Streams frozen parameters of a model for as long as it is open.

    Before a layer (see :func:`find_layers`) is used its parameters are views of memory that was read; after
    its use they are empty, unless the plan keeps it or another layer that has them is in use. Everything
    else of the model stays as it is: trainable parameters, those without a source, buffers.

    A parameter must be used by its layer alone, and not outside of its forward. What saves a view of a weight
    for the backward pass, other than a linear module, keeps the memory of its layer until then. Used by one
    thread at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        sources: Mapping[str, Source],
        engine: StorageEngine,
        budget: int,
        *,
        device_budget: int = 0,
        device: Device | None = None,
    ) -> None:
        """Empty the parameters that have a source, and hook their layers.

        Args:
            sources: where parameters lie, by their names in ``model.named_parameters()``. Those without
                elements are left alone.
            engine: reads them; it stays the caller's to close, after the stream. Where parameters are on a
                GPU its memory should be page-locked.
            budget: how many bytes may be in host memory beside the layer in use (on a GPU: that is being
                copied) and the next one that is read.
            device_budget: how many bytes may be on the GPU beside the layer in use and the next one.
            device: what copies there, if not the GPU that parameters are on.

        Raises:
            ValueError: a name is no parameter's, or one cannot be streamed: the message names it.
        """
        self._engine = engine
        self._parameters = _streamed_parameters(model, sources)
        found = find_layers(model)
        layers = [layer for layer in found if any(p in self._parameters for p in layer.parameters)]
        self._of_layer = [[p for p in layer.parameters if p in self._parameters] for layer in layers]
        self._holders: dict[nn.Parameter, set[int]] = {p: set() for p in self._parameters}
        self.pipeline = Pipeline(engine, self._sources, len(layers), budget)
        """What reads, for its counts."""
        self.uploads: Uploads | None = None
        """What copies to the GPU, for its counts; None where parameters are in host memory."""
        self._tier: Pipeline | Uploads = self.pipeline
        device = device or _accelerator(self._parameters)
        if device is not None:
            self._tier = self.uploads = Uploads(ReadLayers(self.pipeline), device, len(layers), device_budget)
        self.coordinator = LayerCoordinator(layers, self)
        """What the layers' hooks enter, for its count."""
        self._closed = False
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._begin)]
        for number, layer in enumerate(layers):
            self._hooks += hook(layer, number, lambda: self.coordinator)
        self._linear = hold_no_weights(module for layer in layers for module in layer.module.modules())
        for parameter in self._parameters:
            empty(parameter)

    def __enter__(self) -> ModuleStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the reading and take the hooks off; the parameters are empty then. Idempotent.

        Another stream of the model can be made afterwards.
        """
        if not self._closed:
            self._end()
            for parameter in self._parameters:
                empty(parameter)

    def load(self) -> None:
        """Read every parameter into memory of its own, for good, and end the stream.

        Raises:
            StorageError: a read failed; the stream goes on then.
        """
        self._refuse_if_closed()
        records = Records(self._engine, _no_swap_file)
        loaded = {}
        for parameter, (name, source, _) in self._parameters.items():
            records.bind(name, source)
            loaded[parameter] = records.fetch(name)
        self._end()
        for parameter, tensor in loaded.items():
            self._adopt(parameter, tensor.to(parameter.device))

    def _end(self) -> None:
        for handle in self._hooks:
            handle.remove()
        restore(self._linear)
        self.coordinator.forget()
        self._tier.close()
        self._closed = True

    # -- from the coordinator -----------------------------------------------------------------------------

    def use(self, layer: int, *, backward: bool) -> None:
        """Make a layer's parameters available, and start reading those of the next ones.

        Raises:
            StorageError: a read failed.
        """
        self._refuse_if_closed()
        self._let_go(self._tier.make_room(layer))
        parameters = self._of_layer[layer]
        for parameter in parameters:
            self._holders[parameter].add(layer)
        resident = not any(is_empty(parameter) for parameter in parameters)
        read = self._tier.enter(layer, resident=resident)
        if not resident:
            for parameter, tensor in zip(parameters, read, strict=True):
                if is_empty(parameter):
                    self._adopt(parameter, tensor)

    def release(self, layer: int) -> None:
        """A use has ended: what nobody holds is let go, as the plan says."""
        if self._closed:  # a graph that outlives the stream
            return
        self._let_go(self._tier.leave(layer))

    def begin_pass(self) -> None:
        """The model's forward begins."""
        self._tier.begin_pass()

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""
        return self._tier.begins_again(layer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self.coordinator.begin_pass()

    def _sources(self, layer: int) -> list[Source]:
        return [self._parameters[parameter].source for parameter in self._of_layer[layer]]

    def _adopt(self, parameter: nn.Parameter, tensor: Tensor) -> None:
        _, source, shape = self._parameters[parameter]
        with torch.inference_mode(False):  # what is read in inference may stay for training
            parameter.data = tensor[: source.numel].view(shape)

    def _let_go(self, layers: Iterable[int]) -> None:
        for layer in layers:
            for parameter in self._of_layer[layer]:
                self._holders[parameter].discard(layer)
                if not self._holders[parameter]:
                    empty(parameter)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the stream of this model is closed: make another one")


def _streamed_parameters(model: nn.Module, sources: Mapping[str, Source]) -> dict[nn.Parameter, _Streamed]:
    parameters = dict(model.named_parameters())
    streamed = {}
    for name, source in sources.items():
        parameter = parameters.get(name)
        if parameter is None:
            raise ValueError(f"{name}: the model has no such parameter")
        if parameter.requires_grad:
            raise ValueError(f"{name}: is trainable, and only what is frozen can stay in its file")
        shape = shape_of(parameter)
        ours = (parameter.dtype, shape.numel())
        if parameter.is_meta or ours != (source.dtype, source.numel):
            raise ValueError(
                f"{name}: has {shape.numel()} elements of {parameter.dtype} on {parameter.device}, and its "
                f"source gives {source.numel} of {source.dtype} in host memory"
            )
        if source.numel:
            streamed[parameter] = _Streamed(name, source, shape)
    return streamed


def _accelerator(parameters: Iterable[nn.Parameter]) -> Device | None:
    """Return the device that parameters are on, or None if it is the host.

    Raises:
        ValueError: they are on several.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise ValueError(
            f"the streamed parameters are on {sorted(map(str, devices))}: one stream serves one device"
        )
    device = devices.pop() if devices else torch.device("cpu")
    return None if device.type == "cpu" else AcceleratorDevice(device)


def _no_swap_file() -> SwapFile:
    raise RuntimeError("what is streamed is never written")
