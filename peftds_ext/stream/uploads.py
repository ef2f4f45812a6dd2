# SPDX-License-Identifier: Apache-2.0
"""Layers in host memory in, layers on a device out: copies them ahead of their use, along a plan.

A layer's memory on the device is taken when the use before its own begins, in the order of the stream that
computes, and its copy waits for no later work of that stream: so it runs beside the layer that computes
meanwhile. The layer's own work waits for the copy on the device. The caller waits for reads from the disk,
and for a copy only where the host's budget has no room for both what is being copied and what is read next.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from peftds_ext.stream.device import Device, Mark
from peftds_ext.stream.follower import PlanFollower
from peftds_ext.stream.host import HostTier

_NOTED: Final = 1 << 14
"""Events that are kept until somebody asks for them; of more the latest."""

_ALIGNMENT: Final = 512
"""Bytes between which tensors begin, as in memory of torch's own, since matrix products choose by it how
they compute, and so their bits."""


class DeviceEvent(NamedTuple):
    """Something that the device did, by ``time.monotonic_ns()``."""

    kind: Literal["copy", "stall"]
    """A copy, or that the device had nothing to do until a layer was there."""
    layer: int
    bytes: int
    start: Any
    end: Any


@dataclass(eq=False)
class _Upload:
    """A layer's memory on the device, and what comes there."""

    layer: int
    tensors: list[Tensor]
    free: Mark  # when nobody uses the memory for anything else any more
    sources: Sequence[Tensor] = ()
    copied: tuple[Mark, Mark] | None = None
    failure: Exception | None = None


@dataclass
class UploadCounts:
    """Totals; a layer that is used twice counts twice."""

    ready: int = 0
    """Layers whose copy had been queued before their use."""
    demanded: int = 0
    """Those whose copy was queued only then."""
    vain: int = 0
    """Those that were copied and not used."""
    resident: int = 0
    """Uses that found the layer on the device."""
    bytes: int = 0
    """Copied."""
    waits: int = 0
    """Times that the caller waited for a copy, to have host memory."""


class Uploads:
    """The layers of one model on a device. Used by one thread at a time."""

    def __init__(self, host: HostTier, device: Device, layers: int, budget: int, *, parts: int = 1) -> None:
        """Copy ``layers`` layers from ``host``.

        ``budget`` is how many bytes of layers may be on the device beside the one that is in use and the next
        one that is copied. What is copied is one of ``parts`` parts of the layer, all of one size, which is
        put together when it is used.
        """
        self._host, self._device, self._parts = host, device, parts
        self._follower = PlanFollower(layers, budget)
        self._layouts: list[_Layout] = []
        self._coming: dict[int, _Upload] = {}  # by layer: not used yet
        self._copying: list[_Upload] = []  # whose host memory is read
        # Not even a model that is dropped in mid-copy may leave memory to others that is still copied to.
        weakref.finalize(self, _finish_copies, device, self._copying).atexit = False
        self._noted: deque[DeviceEvent] = deque(maxlen=_NOTED)  # with marks in the place of times
        self.counts = UploadCounts()
        """Totals of the run."""

    @property
    def staying(self) -> frozenset[int]:
        """The layers that the plan keeps on the device until their next use."""
        return self._follower.staying

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes on the device by layer; 0 for what has nothing to copy. Known at the first use."""
        return self._follower.sizes

    # -- uses -------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The model's forward begins."""
        self.forget()
        self._lay_out()
        self._follower.begin_pass()
        self._host.begin_pass(self._follower.to_bring())

    def begins_again(self, layer: int) -> bool:
        """Tell whether a layer is the one that this pass began with, so that another pass begins here."""
        return self._follower.begins_again(layer)

    def make_room(self, layer: int) -> list[int]:
        """Return the layers that are to be let go before another one's use begins."""
        return self._follower.make_room(layer)

    def enter(self, layer: int, *, resident: bool) -> list[Tensor]:
        """The use of a layer begins; copies the next ones ahead.

        Returns the layer's tensors, of one dimension, unless it is ``resident``. The current stream waits for
        their copy; another stream that uses them must do so itself.

        Raises:
            StorageError: a read failed.
        """
        self._lay_out()
        self._follower.use(layer)
        self._let_go_of_host_memory()
        wanted = self._follower.coming()
        for other in [other for other in self._coming if other != layer and other not in wanted]:
            self._drop(other)
        tensors: list[Tensor] = []
        if resident:
            self._drop(layer)
            self.counts.resident += bool(self._layouts[layer].size)
        elif self._layouts[layer].size:
            tensors = self._bring(layer)
        self._bring_ahead(wanted)
        return tensors

    def leave(self, layer: int) -> list[int]:
        """The use of a layer has ended; returns the layers that are to be let go."""
        return self._follower.leave(layer)

    def rest(self) -> None:
        """No layer is in use until the next pass; what was copied ahead may be out of date by then."""
        self.forget()
        self._wait_for_host_memory()  # what is read meanwhile needs it, and the optimizer waits for more
        self._host.rest()

    def forget(self) -> None:
        """Drop what was copied ahead."""
        for layer in list(self._coming):
            self._drop(layer)

    def settle(self) -> None:
        """Wait for copies that are under way, also of layers in use: host memory is going to be written."""
        _finish_copies(self._device, self._copying)
        self._let_go_of_host_memory()

    def changed(self, layer: int) -> None:
        """A layer in host memory is other than it was."""
        self._drop(layer)

    def close(self) -> None:
        """Wait for copies, give their host memory back, and close the host's side. Idempotent."""
        self.forget()
        self.settle()
        self._host.close()

    def drain(self) -> list[DeviceEvent]:
        """Return the events since the last call that are over."""
        over: list[DeviceEvent] = []
        for noted in [self._noted.popleft() for _ in range(len(self._noted))]:
            (over if self._device.is_over(noted.end) else self._noted).append(noted)
        times = self._device.times([mark for noted in over for mark in (noted.start, noted.end)])
        return [
            noted._replace(start=start, end=end)
            for noted, start, end in zip(over, times[::2], times[1::2], strict=True)
        ]

    # -- copies -----------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        if self._layouts:
            return
        self._layouts = [_Layout(self._host.shapes(layer)) for layer in range(len(self._follower.sizes))]
        for layer, layout in enumerate(self._layouts):
            self._follower.resize(layer, self._parts * layout.size, layout.size)

    def _bring(self, layer: int) -> list[Tensor]:
        """Let the current stream have a layer's tensors."""
        before = self._device.mark()
        upload = self._coming.pop(layer, None)
        if upload is not None and upload.failure is not None:
            failure, upload.failure = upload.failure, None
            raise failure
        upload = upload or self._reserve(layer)
        if upload.copied is None:
            self._host.make_room(layer)
            self._wait_for_host_memory()
            copied = self._copy(upload)
            self.counts.demanded += 1
        else:
            copied = upload.copied
            self.counts.ready += 1
        self._device.wait(copied[1])
        self._noted.append(DeviceEvent("stall", layer, 0, before, self._device.mark()))
        tensors, upload.tensors = upload.tensors, []  # it may be a while until the copy is known to be over
        return tensors

    def _bring_ahead(self, layers: Sequence[int]) -> None:
        """Take memory for the next layers, and copy those that are in host memory, in their order."""
        for layer in layers:
            if layer not in self._coming:
                try:
                    self._coming[layer] = self._reserve(layer)
                except torch.OutOfMemoryError:  # a layer that is needed fails, if there is still no room then
                    break
        for layer in layers:
            upload = self._coming.get(layer)
            if upload is None or upload.failure is not None:
                return
            if upload.copied is not None:
                continue
            self._host.make_room(layer)
            if self._transient() or not self._host.is_ready(layer):
                return
            try:
                self._copy(upload)
            except Exception as error:  # who needs the layer is told
                upload.failure = error.with_traceback(None)  # whose frames refer to layers
                upload.tensors = []
                return

    def _reserve(self, layer: int) -> _Upload:
        layout = self._layouts[layer]
        with torch.inference_mode(False):  # what comes in inference may stay for training
            tensors = layout.tensors_in(self._device.allocate(layout.size))
        return _Upload(layer, tensors, self._device.mark())

    def _copy(self, upload: _Upload) -> tuple[Mark, Mark]:
        upload.sources = self._host.fetch(upload.layer)
        self._copying.append(upload)
        with torch.no_grad():
            pairs = list(zip(upload.tensors, upload.sources, strict=True))
            upload.copied = self._device.copy(pairs, upload.free)
        size = sum(source.nbytes for source in upload.sources)
        self.counts.bytes += size
        self._noted.append(DeviceEvent("copy", upload.layer, size, *upload.copied))
        return upload.copied

    def _drop(self, layer: int) -> None:
        """Let go of what was to come of a layer. Its memory is used again after the copy."""
        upload = self._coming.pop(layer, None)
        if upload is not None and upload.copied is not None:
            self.counts.vain += 1
            self._device.wait(upload.copied[1], on=upload.free)
            upload.tensors = []

    # -- host memory ------------------------------------------------------------------------------------

    def _let_go_of_host_memory(self) -> None:
        """Let go of what was copied."""
        under_way = []
        for upload in self._copying:
            if upload.copied is not None and not self._device.is_over(upload.copied[1]):
                under_way.append(upload)
            else:
                upload.sources = ()
        self._copying[:] = under_way

    def _transient(self) -> list[_Upload]:
        self._let_go_of_host_memory()
        return [upload for upload in self._copying if self._host.is_transient(upload.layer)]

    def _wait_for_host_memory(self) -> None:
        for upload in self._transient():
            if upload.copied is not None:
                self.counts.waits += 1
                self._device.finish(upload.copied[1])
        self._let_go_of_host_memory()


def _finish_copies(device: Device, uploads: Sequence[_Upload]) -> None:
    for upload in uploads:
        if upload.copied is not None:
            device.finish(upload.copied[1])


class _Layout:
    """Where the tensors of a layer lie in its block."""

    def __init__(self, shapes: Sequence[tuple[int, torch.dtype]]) -> None:
        self._places: list[tuple[int, int, torch.dtype]] = []  # beginning and end in bytes
        self.size = 0
        for numel, dtype in shapes:
            end = self.size + numel * dtype.itemsize
            self._places.append((self.size, end, dtype))
            self.size = -(-end // _ALIGNMENT) * _ALIGNMENT

    def tensors_in(self, block: Tensor) -> list[Tensor]:
        """Return the tensors of a block of bytes."""
        return [block[start:end].view(dtype) for start, end, dtype in self._places]
