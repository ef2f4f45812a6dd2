# SPDX-License-Identifier: Apache-2.0
"""Makes a layer's ZeRO-3 parameters available and lets them go, with a pipeline for those on the disk.

Two things are apart here: a parameter is *gathered* while ``param.data`` is its whole tensor, and its
partition is *in memory* while ``param.ds_tensor.data`` is. On the CPU with one rank both are the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from peftds_ext.integrations.deepspeed.param_swapper import ParameterSwapper
from peftds_ext.observe.stats import Stats, pinned_bytes
from peftds_ext.store.records import Source
from peftds_ext.stream.layers import Layer
from peftds_ext.stream.pipeline import Pipeline
from peftds_ext.stream.recorder import Recorder
from peftds_ext.stream.uploads import Uploads

if TYPE_CHECKING:
    from peftds_ext._native._core import Arena


class LayerFetch:
    """What is gathered of each layer, what stays in memory, and what is on its way from the disk."""

    def __init__(self, layers: Sequence[Layer], budget: int, recorder: Recorder) -> None:
        """Take over the layers' parameters, which belong to DeepSpeed.

        ``budget`` is how many bytes of partitions that are on the disk may be in memory beside those of the
        layer that is in use and of the next one.
        """
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._gathered, self._absent = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
        self._layers: list[tuple[Any, ...]] = [layer.parameters for layer in layers]
        self._aliased = all(map(_is_whole_on_the_host, each(self._layers)))
        self._budget = budget
        self._recorder = recorder
        self.before_gather: Callable[[Sequence[Any]], None] = _nobody_cares
        """Is called with the parameters that are about to be gathered."""

    @functools.cached_property
    def _swapped(self) -> list[tuple[Any, ...]]:
        """By layer, what lies on the disk; looked up at the first use, since DeepSpeed moves some before."""
        return [tuple(p for p in params if is_swapped(p)) for params in self._layers]

    @functools.cached_property
    def pipeline(self) -> Pipeline | None:
        """What reads layers from the disk; None where nothing lies there."""
        swappers = self._swappers()
        if not swappers:
            return None
        pipeline = Pipeline(swappers[0].engine, self._sources, len(self._layers), self._budget)
        layers_of: dict[int, list[int]] = {}
        for layer, parameters in enumerate(self._swapped):
            for parameter in parameters:
                layers_of.setdefault(parameter.ds_id, []).append(layer)

        def changed(parameter: Any) -> None:
            for layer in layers_of.get(parameter.ds_id, ()):
                self.changed(layer)

        for swapper in swappers:
            swapper.when_changed = changed
        return pipeline

    def _swappers(self) -> list[ParameterSwapper]:
        return list(dict.fromkeys(p.nvme_swapper for p in each(self._swapped)))

    def _sources(self, layer: int) -> list[Source]:
        return [parameter.nvme_swapper.source(parameter) for parameter in self._swapped[layer]]

    def changed(self, layer: int) -> None:
        """What lies on the disk of a layer is going to be other than it was."""
        if self.pipeline is not None:
            self.pipeline.changed(layer)

    def begin_pass(self) -> None:
        """The model's forward begins."""
        if self.pipeline is not None:
            self.pipeline.begin_pass()

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""
        return self.pipeline is not None and self.pipeline.begins_again(layer)

    def rest(self) -> None:
        """A backward pass is over: no layer is in use until the next forward."""
        if self.pipeline is not None:
            self.pipeline.rest()

    def use(self, layer: int, *, backward: bool) -> None:
        """Make a layer's parameters available, and start reading those of the next ones.

        Raises:
            StorageError: a read failed.
        """
        if self.pipeline is not None:
            self._bring(self.pipeline, layer)
        self._gather([p for p in self._layers[layer] if p.ds_status is self._absent])
        for parameter in self._layers[layer]:
            parameter.ds_active_sub_modules.add((id(self), layer))
        self._recorder.begin(layer, "backward" if backward else "forward")

    def _bring(self, pipeline: Pipeline, layer: int) -> None:
        for other in pipeline.make_room(layer):
            self._evict(other)
        swapped = self._swapped[layer]
        absent = [p.nvme_swapper.is_absent(p) for p in swapped]
        tensors = pipeline.enter(layer, resident=not any(absent))
        for index, parameter in enumerate(swapped):
            if absent[index]:
                parameter.nvme_swapper.adopt(parameter, tensors[index])
            else:  # there, or on its way for somebody else
                parameter.nvme_swapper.bring([parameter])

    def release(self, layer: int) -> None:
        """A use has ended: what no other layer uses is let go, on the disk's side as the plan says."""
        self._recorder.end(layer)
        going = self.pipeline.leave(layer) if self.pipeline is not None else []
        kept = layer not in going
        idle = self._deactivate(layer)
        if not (kept and self._aliased):  # else gathered and in memory are the same
            self._let_go([p for p in idle if not (p.ds_persist or p.is_external_param)], stay=kept)
        for other in going:
            if other != layer:
                self._evict(other)

    def _evict(self, layer: int) -> None:
        """Let a layer go that was to stay."""
        idle = [p for p in self._swapped[layer] if not (p.ds_active_sub_modules or p.ds_persist)]
        self._let_go(idle, stay=False)
        for parameter in idle:
            parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])

    def release_all(self, parameters: Iterable[Any]) -> None:
        """Let everything go; in memory stays what the plan wants to keep."""
        staying_layers = self.pipeline.staying if self.pipeline is not None else ()
        staying = {id(p) for layer in staying_layers for p in self._layers[layer]}
        parameters = list(parameters)
        for parameter in parameters:
            parameter.ds_active_sub_modules.clear()
        self._let_go([p for p in parameters if id(p) in staying], stay=True)
        self._let_go([p for p in parameters if id(p) not in staying], stay=False)

    def drop_copies(self) -> None:
        """Partitions may be changed. Here nothing is a copy of them that outlives a use."""

    def end_step(self, optimizer_began: int) -> None:
        """A step has ended, whose optimizer's part began at a time of the monotonic clock."""
        executor = self.pipeline.executor if self.pipeline is not None else None
        self._recorder.end_step(executor, self._copies(), optimizer_began)

    def _arenas(self) -> set[Arena]:
        """Return the memory that partitions come to from the disk."""
        return {swapper.engine.arena for swapper in self._swappers()}

    def _locked_bytes(self) -> int:
        return sum(arena.usage().locked for arena in self._arenas())

    def _copies(self) -> Uploads | None:
        """Return what copies to a device."""
        return None

    def stats(self, entries: int) -> Stats:
        """Return the record of the run; ``entries`` are the calls from the model so far."""
        in_memory = {id(p): p.ds_tensor.nbytes for p in each(self._layers) if not is_swapped(p)}
        held = sum(in_memory.values())
        usages = [arena.usage() for arena in self._arenas()]
        return Stats(
            last_step=self._recorder.last,
            run=self._recorder.run,
            steps=self._recorder.steps,
            host_bytes_held=held + sum(usage.live for usage in usages),
            host_bytes_peak=held + sum(usage.peak_live for usage in usages),
            # Some drivers lock memory for a GPU without the system counting it.
            pinned_bytes=max(pinned_bytes(), self._locked_bytes()),
            python_entries=entries,
        )

    def close(self) -> None:
        """End the reading ahead and the trace. Idempotent."""
        self._recorder.close()
        if "pipeline" not in self.__dict__:  # no layer was ever used
            return
        for swapper in self._swappers():
            swapper.when_changed = _nobody_cares
        if self.pipeline is not None:
            self.pipeline.close()

    def _deactivate(self, layer: int) -> list[Any]:
        """Take a layer off its parameters' users; returns those without any."""
        for parameter in self._layers[layer]:
            parameter.ds_active_sub_modules.discard((id(self), layer))
        return [p for p in self._layers[layer] if not p.ds_active_sub_modules]

    def _gather(self, parameters: Sequence[Any]) -> None:
        if not parameters:
            return
        self.before_gather(parameters)
        if not self._aliased:
            with torch.inference_mode(False), torch.no_grad():  # what is gathered in inference may stay
                parameters[0].all_gather_coalesced(parameters).wait()
            return
        for parameter in parameters:
            parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
            parameter.ds_status = self._gathered

    def _let_go(self, parameters: Sequence[Any], *, stay: bool) -> None:
        gathered = [p for p in parameters if p.ds_status is self._gathered]
        if not self._aliased and gathered and not stay:
            gathered[0].partition(gathered)
            return
        with torch.inference_mode(False):  # training comes after inference, and wants ordinary tensors
            for parameter in gathered:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                parameter.ds_status = self._absent
        if not stay:
            for parameter in gathered:
                if is_swapped(parameter):
                    parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def _nobody_cares(parameter: Any) -> None:
    pass


def each(groups: Iterable[Iterable[Any]]) -> Iterable[Any]:
    return (item for group in groups for item in group)


def is_swapped(parameter: Any) -> bool:
    """Whether a parameter's partition is on the disk."""
    swapper = parameter.nvme_swapper
    return isinstance(swapper, ParameterSwapper) and swapper.has(parameter)


def _is_whole_on_the_host(parameter: Any) -> bool:
    """Whether a parameter is not divided among ranks, and is used where its partition is: on the CPU."""
    return bool(parameter.ds_zero_partition_world_size == 1 and parameter.device.type == "cpu")
