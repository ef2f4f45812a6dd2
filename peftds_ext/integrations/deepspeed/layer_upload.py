# SPDX-License-Identifier: Apache-2.0
"""Makes a layer's ZeRO-3 parameters available on a GPU whose partitions are in host memory or on the disk.

What is frozen is copied ahead of its use, and is never copied back. What is trained changes in the host's
memory with every step, and is copied when it is used. With several ranks each copies its partitions, and a
layer's use begins with one gather.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from peftds_ext.integrations.deepspeed.host_partitions import HostPartitions
from peftds_ext.integrations.deepspeed.layer_fetch import LayerFetch, each, is_swapped
from peftds_ext.integrations.deepspeed.parameter_calls import before_gathers, before_updates
from peftds_ext.stream.device import Device, Mark
from peftds_ext.stream.host import ReadLayers
from peftds_ext.stream.layers import Layer
from peftds_ext.stream.recorder import Recorder
from peftds_ext.stream.uploads import Uploads

logger = logging.getLogger("peftds_ext")


class LayerUpload(LayerFetch):
    """What is on the device of each layer, what stays there, and what is on its way."""

    def __init__(
        self,
        layers: Sequence[Layer],
        budget: int,
        recorder: Recorder,
        *,
        device: Device,
        device_budget: int,
        page_lock: object | None,
    ) -> None:
        """Take over the layers' parameters, which belong to DeepSpeed.

        ``budget`` is how many bytes of partitions that are on the disk may be in host memory beside those of
        the layer that is copied and of the next one, ``device_budget`` how many of parameters may be on the
        device beside those of the layer in use and of the next one.
        """
        super().__init__(layers, budget, recorder)
        self._aliased = False
        self._frozen = {id(p) for layer in layers for p in layer.parameters if not p.requires_grad}
        self._device, self._device_budget, self._page_lock = device, device_budget, page_lock
        self._latest_sent: Mark | None = None
        self._closed = self._told_of_unlocked = False

    @functools.cached_property
    def _uploaded(self) -> list[tuple[Any, ...]]:
        """By layer, what is copied; looked up at the first use, since DeepSpeed moves some before."""
        return [
            tuple(p for p in params if id(p) in self._frozen and not p.ds_persist and _comes_from_host(p))
            for params in self._layers
        ]

    @functools.cached_property
    def _swapped(self) -> list[tuple[Any, ...]]:
        return [tuple(filter(is_swapped, params)) for params in self._uploaded]

    @functools.cached_property
    def _reads(self) -> ReadLayers | None:
        return None if self.pipeline is None else ReadLayers(self.pipeline, self._check)

    @functools.cached_property
    def _host(self) -> HostPartitions:
        return HostPartitions(self._uploaded, self._reads, is_swapped, self._page_lock)

    @functools.cached_property
    def uploads(self) -> Uploads:
        """What copies layers to the device."""
        self._stand_between()
        return Uploads(self._host, self._device, len(self._layers), self._device_budget, parts=self._parts)

    def _copies(self) -> Uploads | None:
        return self.__dict__.get("uploads")

    def _locked_bytes(self) -> int:
        host: HostPartitions | None = self.__dict__.get("_host")  # there is none before the first use
        arena = host.arena if host is not None else None
        return super()._locked_bytes() + (0 if arena is None else arena.usage().locked)

    def _tell_of_unlocked(self) -> None:
        """Warn once where host memory is not page-locked, as far as it was to be."""
        if self._told_of_unlocked:
            return
        arenas = self._arenas() | ({self._host.arena} if self._host.arena is not None else set())
        reason = next((arena.why_not_locked for arena in arenas if arena.why_not_locked), "")
        if reason:
            logger.warning("host memory of layers is not page-locked, which makes copies slow: %s", reason)
            self._told_of_unlocked = True

    @functools.cached_property
    def _parts(self) -> int:
        sizes = {p.ds_zero_partition_world_size for p in each(self._layers)}
        return int(max(sizes, default=1))

    def _check(self, layer: int, read: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._swapped[layer], read, strict=True):
            parameter.nvme_swapper.check(parameter, tensor)

    def _stand_between(self) -> None:
        """Let those who gather find partitions, and copies that they put out of date be dropped."""
        layers_of: dict[int, list[int]] = {}
        for layer, parameters in enumerate(self._uploaded):
            for parameter in parameters:
                layers_of.setdefault(parameter.ds_id, []).append(layer)
        ours = weakref.ref(self)

        def changed(parameters: Iterable[Any]) -> None:
            owner = ours()
            if owner is None:
                return
            for layer in {layer for p in parameters for layer in layers_of.get(p.ds_id, ())}:
                owner.changed(layer)

        whole = list(dict.fromkeys(each(self._layers)))
        before_updates(whole, changed)
        before_gathers(whole, functools.partial(_bring_partitions, self._gathered))

    def changed(self, layer: int) -> None:
        """A frozen parameter of a layer is going to be other than it was."""
        if self._closed:
            return
        if self._reads is not None:
            self._reads.changed(layer)
        self.uploads.changed(layer)

    # -- from the coordinator -----------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The model's forward begins."""
        self.uploads.begin_pass()
        self._tell_of_unlocked()

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""
        return self.uploads.begins_again(layer)

    def rest(self) -> None:
        """A backward pass is over: no layer is in use until the next forward."""
        self.uploads.rest()

    def use(self, layer: int, *, backward: bool) -> None:
        """Make a layer's parameters available on the device, and start copying those of the next ones.

        Raises:
            StorageError: a read failed.
        """
        for other in self.uploads.make_room(layer):
            self._evict(other)
        uploaded = self._uploaded[layer]
        if any(p.ds_status is self._absent for p in uploaded):  # else the others keep the whole old block
            gathered = [p for p in uploaded if p.ds_status is self._gathered]
            self._free([p for p in gathered if not (p.ds_active_sub_modules or _is_gathered_by_hand(p))])
        resident = all(parameter.ds_status is self._gathered for parameter in uploaded)
        copied = zip(uploaded, self.uploads.enter(layer, resident=resident), strict=not resident)
        copies = [(p, tensor) for p, tensor in copied if p.ds_status is self._absent]
        taken = {id(parameter) for parameter, _ in copies}
        others = [p for p in self._layers[layer] if p.ds_status is self._absent and id(p) not in taken]
        with torch.inference_mode(False), torch.no_grad():  # what comes in inference may stay for training
            self._adopt([*copies, *self._send([p for p in others if not is_swapped(p)])])
        self._gather([p for p in others if is_swapped(p)])
        for parameter in self._layers[layer]:
            parameter.ds_active_sub_modules.add((id(self), layer))
        self._recorder.begin(layer, "backward" if backward else "forward")

    def release(self, layer: int) -> None:
        """A use has ended: what no other layer uses is let go, unless the plan keeps it on the device."""
        self._recorder.end(layer)
        going = self.uploads.leave(layer)
        kept = () if layer in going else self._uploaded[layer]
        staying = {id(parameter) for parameter in kept}
        self._free([p for p in self._deactivate(layer) if id(p) not in staying])
        for other in going:
            if other != layer:
                self._evict(other)

    def release_all(self, parameters: Iterable[Any]) -> None:
        """Let everything go but what the plan keeps on the device."""
        self.uploads.forget()
        if self._latest_sent is not None:  # what was trained is going to be changed in the host's memory
            self._device.finish(self._latest_sent)
            self._latest_sent = None
        staying = {id(p) for layer in self.uploads.staying for p in self._uploaded[layer]}
        parameters = list(parameters)
        for parameter in parameters:
            parameter.ds_active_sub_modules.clear()
        self._put_away([p for p in parameters if id(p) not in staying])

    def drop_copies(self) -> None:
        """Partitions may be changed: let go of all that was copied of them."""
        self.uploads.forget()
        self.uploads.settle()
        self._put_away(list(each(self._uploaded)))

    def close(self) -> None:
        """End the copying, the reading and the trace. Idempotent."""
        uploads = self._copies()
        if uploads is not None and not self._closed:
            self._closed = True
            self._put_away(list(each(self._uploaded)))
            uploads.close()
        super().close()

    # -- parameters ---------------------------------------------------------------------------------------

    def _send(self, parameters: Sequence[Any]) -> list[tuple[Any, Tensor]]:
        """Copy the partitions of what is trained as they are now, and do not wait for that.

        DeepSpeed's gather waits for each of its own copies.
        """
        if not parameters:
            return []
        self.before_gather(parameters)
        sent = [(p, p.ds_tensor.data.to(p.device, non_blocking=True, copy=True)) for p in parameters]
        self._latest_sent = self._device.mark()
        return sent

    def _adopt(self, pairs: Sequence[tuple[Any, Tensor]]) -> None:
        """Let parameters be what was copied of them: their whole, or this rank's part."""
        if not pairs:
            return
        if self._parts > 1:
            with _on_the_device(pairs):
                parameters = [parameter for parameter, _ in pairs]
                parameters[0].all_gather_coalesced(parameters).wait()
            return
        for parameter, tensor in pairs:
            parameter.data = tensor.view(parameter.ds_shape)
            parameter.ds_status = self._gathered

    def _evict(self, layer: int) -> None:
        """Let a layer go that was to stay."""
        self._free([p for p in self._uploaded[layer] if not p.ds_active_sub_modules])

    def _free(self, parameters: Sequence[Any]) -> None:
        self._put_away([p for p in parameters if not (p.ds_persist or p.is_external_param)])

    def _put_away(self, parameters: Sequence[Any]) -> None:
        self._let_go(parameters, stay=True)
        for parameter in parameters:
            if is_swapped(parameter) and id(parameter) not in self._frozen:
                parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def _is_gathered_by_hand(parameter: Any) -> bool:
    """Whether a parameter is inside of ``GatheredParameters``, where it may be changed."""
    from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR

    return bool(getattr(parameter, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0))


def _comes_from_host(parameter: Any) -> bool:
    """Whether a partition has bytes, and they are on the disk or in host memory."""
    partition = parameter.ds_tensor
    return bool(partition.ds_numel) and (is_swapped(parameter) or partition.device.type == "cpu")


def _bring_partitions(gathered: Any, parameters: Iterable[Any]) -> None:
    """Read the partitions of those that are on the device, which DeepSpeed takes for granted."""
    for parameter in parameters:
        if parameter.ds_status is gathered and is_swapped(parameter):
            parameter.nvme_swapper.bring([parameter])


@contextlib.contextmanager
def _on_the_device(pairs: Sequence[tuple[Any, Tensor]]) -> Iterator[None]:
    """Let partitions be their copies on the device, for DeepSpeed to gather."""
    before = [(parameter.ds_tensor.data, parameter.ds_tensor.status) for parameter, _ in pairs]
    try:
        for parameter, tensor in pairs:
            parameter.ds_tensor.data = tensor
            parameter.ds_tensor.status = _available()
        yield
    finally:
        for (parameter, _), (data, status) in zip(pairs, before, strict=True):
            parameter.ds_tensor.data, parameter.ds_tensor.status = data, status


def _available() -> Any:
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    return PartitionedParamStatus.AVAILABLE
