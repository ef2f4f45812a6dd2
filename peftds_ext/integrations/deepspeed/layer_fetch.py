# SPDX-License-Identifier: Apache-2.0
"""Makes a layer's ZeRO-3 parameters available and lets them go, reading ahead in the order of earlier passes.

Two things are apart here: a parameter is *gathered* while ``param.data`` is its whole tensor, and its
partition is *in memory* while ``param.ds_tensor.data`` is. On the CPU with one rank both are the same bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from peftds_ext.integrations.deepspeed.param_swapper import ParameterSwapper
from peftds_ext.stream.layers import Layer
from peftds_ext.stream.plan import Orders
from peftds_ext.stream.residency import kept_after


class LayerFetch:
    """What is gathered of each layer, what stays in memory, and what is on its way from the disk."""

    def __init__(self, layers: Sequence[Layer], budget: int) -> None:
        """Take over the layers' parameters, which belong to DeepSpeed.

        ``budget`` is how many bytes of partitions that are on the disk may stay in memory between their uses,
        beside the layer that is in use and the one that is read ahead.
        """
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        self._gathered, self._absent = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
        self._layers: list[tuple[Any, ...]] = [layer.parameters for layer in layers]
        self._one_rank = all(map(_is_whole_on_the_host, _each(self._layers)))
        self._budget = budget
        self._orders = Orders()
        self._kept: tuple[bool, ...] = ()
        self._kept_of: tuple[int, ...] | None = None
        self._ahead: int | None = None  # the layer that is being read ahead
        self._staying: set[int] = set()  # layers whose partitions stay in memory till their next use

    @functools.cached_property
    def _swapped(self) -> list[tuple[Any, ...]]:
        """By layer, what lies on the disk; looked up at the first use, since DeepSpeed moves some before."""
        return [tuple(p for p in params if _is_swapped(p)) for params in self._layers]

    @functools.cached_property
    def _any_swapped(self) -> bool:
        return any(self._swapped)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [sum(map(_partition_bytes, params)) for params in self._swapped]

    def begin_pass(self) -> None:
        """The model's forward begins."""
        self._orders.begin()

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""
        return self._orders.first == layer

    def use(self, layer: int) -> None:
        """Make a layer's parameters available, and start reading those of the next one.

        Raises:
            StorageError: a read failed.
        """
        self._orders.use(layer)
        self._staying.discard(layer)
        swapped = self._swapped[layer]
        if swapped:
            swapped[0].nvme_swapper.start(swapped)
        self._read_ahead(layer)
        if swapped:
            swapped[0].nvme_swapper.bring(swapped)
        self._gather([p for p in self._layers[layer] if p.ds_status is self._absent])
        for parameter in self._layers[layer]:
            parameter.ds_active_sub_modules.add((id(self), layer))

    def release(self, layer: int) -> None:
        """A use has ended: what no other layer uses is let go, on the disk's side as the plan says."""
        if self._is_kept(layer):
            self._make_room(beside=layer)
            self._staying.add(layer)
            if self._one_rank:  # gathered and in memory are the same here
                self._deactivate(layer)
                return
        gone = [p for p in self._deactivate(layer) if not (p.ds_persist or p.is_external_param)]
        self._let_go(gone, stay=layer in self._staying)

    def release_all(self, parameters: Iterable[Any]) -> None:
        """Let everything go; in memory stays what the plan wants to keep."""
        staying = {id(p) for layer in self._staying for p in self._layers[layer]}
        parameters = list(parameters)
        for parameter in parameters:
            parameter.ds_active_sub_modules.clear()
        self._let_go([p for p in parameters if id(p) in staying], stay=True)
        self._let_go([p for p in parameters if id(p) not in staying], stay=False)

    def _make_room(self, beside: int) -> None:
        """Let layers go that another order wanted to keep, until the rest is within the budget."""
        others = self._staying - {beside}
        excess = sum(self._sizes[other] for other in others) - self._budget
        order = self._orders.followed or ()
        for other in sorted(others, key=lambda other: other in order):
            if excess <= 0:
                return
            excess -= self._sizes[other]
            self._staying.discard(other)
            idle = [p for p in self._swapped[other] if not (p.ds_active_sub_modules or p.ds_persist)]
            self._let_go(idle, stay=False)
            for parameter in idle:
                parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])

    def _deactivate(self, layer: int) -> list[Any]:
        """Take a layer off its parameters' users; returns those without any."""
        for parameter in self._layers[layer]:
            parameter.ds_active_sub_modules.discard((id(self), layer))
        return [p for p in self._layers[layer] if not p.ds_active_sub_modules]

    def _gather(self, parameters: Sequence[Any]) -> None:
        if not parameters:
            return
        if not self._one_rank:
            parameters[0].all_gather_coalesced(parameters).wait()
            return
        for parameter in parameters:
            parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
            parameter.ds_status = self._gathered

    def _let_go(self, parameters: Sequence[Any], *, stay: bool) -> None:
        gathered = [p for p in parameters if p.ds_status is self._gathered]
        if not self._one_rank and gathered and not stay:
            gathered[0].partition(gathered)
            return
        with torch.inference_mode(False):  # training comes after inference, and wants ordinary tensors
            for parameter in gathered:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                parameter.ds_status = self._absent
        if not stay:
            for parameter in gathered:
                if _is_swapped(parameter):
                    parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])

    def _is_kept(self, layer: int) -> bool:
        order, position = self._orders.followed, self._orders.position - 1
        if order is None or position < 0 or order[position] != layer:
            return False
        if self._kept_of is not order:
            self._kept, self._kept_of = kept_after(order, self._sizes, self._budget), order
        return self._kept[position]

    def _read_ahead(self, layer: int) -> None:
        """Start reading the layer that comes after this one; what was read ahead in vain is dropped."""
        following = self._next_on_disk()
        if self._ahead not in (None, layer, following):
            idle = [p for p in self._swapped[self._ahead] if p.ds_status is self._absent]
            for parameter in idle:
                parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
        self._ahead = None
        if following is not None and following != layer and following not in self._staying:
            self._ahead = following
            self._swapped[following][0].nvme_swapper.read_ahead(self._swapped[following])

    def _next_on_disk(self) -> int | None:
        order, position = self._orders.followed, self._orders.position
        if order is None or not self._any_swapped:
            return None
        ahead = itertools.chain(itertools.islice(order, position, None), order)
        return next((layer for layer in ahead if self._swapped[layer]), None)


def _each(groups: Iterable[Iterable[Any]]) -> Iterable[Any]:
    return (item for group in groups for item in group)


def _is_swapped(parameter: Any) -> bool:
    swapper = parameter.nvme_swapper
    return isinstance(swapper, ParameterSwapper) and swapper.has(parameter)


def _partition_bytes(parameter: Any) -> int:
    size: int = parameter.ds_tensor.ds_numel * parameter.ds_tensor.dtype.itemsize
    return size


def _is_whole_on_the_host(parameter: Any) -> bool:
    """Whether a parameter is not divided among ranks, and is used where its partition is: on the CPU."""
    return bool(parameter.ds_zero_partition_world_size == 1 and parameter.device.type == "cpu")
