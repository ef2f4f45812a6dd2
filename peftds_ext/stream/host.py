# SPDX-License-Identifier: Apache-2.0
"""Layers in host memory on their way to a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from peftds_ext.stream.pipeline import Pipeline


class HostTier(Protocol):
    """Where a device's layers come from."""

    def shapes(self, layer: int) -> Sequence[tuple[int, torch.dtype]]:
        """Return the elements and the dtype of each tensor of a layer."""

    def is_ready(self, layer: int) -> bool:
        """Tell whether :meth:`fetch` need not wait."""

    def make_room(self, layer: int) -> None:
        """Let those go that do not stay beside a layer that is about to be fetched."""

    def is_transient(self, layer: int) -> bool:
        """Tell whether the memory of a layer that was fetched is given back when nobody refers to it."""

    def fetch(self, layer: int) -> Sequence[Tensor]:
        """Return a layer's tensors, and start to read those that are fetched after it.

        They are contiguous and of one dimension, and their memory is nobody else's as long as they are
        referred to. Earlier ones that are transient must have been given back.

        Raises:
            StorageError: a read failed.
        """

    def begin_pass(self, expected: Sequence[int]) -> None:
        """The model's forward begins, in which these layers are going to be fetched, if nothing changes."""

    def rest(self) -> None:
        """Nothing is fetched until the next pass."""

    def close(self) -> None:
        """Nothing is fetched any more. Idempotent."""


class ReadLayers:
    """Layers that are read from files into host memory, within a budget of their own."""

    def __init__(
        self, pipeline: Pipeline, check: Callable[[int, Sequence[Tensor]], None] = lambda layer, read: None
    ) -> None:
        """Fetch through ``pipeline``; ``check`` gets each layer that was read, and raises if damaged."""
        self.pipeline = pipeline
        """What reads."""
        self._check = check
        self._kept: dict[int, Sequence[Tensor]] = {}

    def shapes(self, layer: int) -> Sequence[tuple[int, torch.dtype]]:
        """Return the elements and the dtype of each tensor of a layer."""
        return self.pipeline.shapes(layer)

    def is_ready(self, layer: int) -> bool:
        """Tell whether :meth:`fetch` need not wait."""
        return layer in self._kept or self.pipeline.executor.ready(layer)

    def make_room(self, layer: int) -> None:
        """Let those go that do not stay beside a layer that is about to be fetched."""
        self._forget(self.pipeline.make_room(layer))

    def is_transient(self, layer: int) -> bool:
        """Tell whether the memory of a layer that was fetched is given back when nobody refers to it."""
        return layer not in self._kept

    def fetch(self, layer: int) -> Sequence[Tensor]:
        """Return a layer's tensors, and start to read the next ones; see :meth:`HostTier.fetch`."""
        tensors = self._kept.get(layer)
        read = self.pipeline.enter(layer, resident=tensors is not None)
        if tensors is None:
            self._check(layer, read)
            tensors = self._kept[layer] = read
        self._forget(self.pipeline.leave(layer))
        return tensors

    def changed(self, layer: int) -> None:
        """What lies on the disk of a layer is other than it was, or elsewhere."""
        self._forget([layer])
        self.pipeline.changed(layer)

    def begin_pass(self, expected: Sequence[int]) -> None:
        """The model's forward begins, in which these layers are going to be fetched, if nothing changes."""
        self.pipeline.begin_pass(expected)

    def rest(self) -> None:
        """Nothing is fetched until the next pass: what it begins with is read ahead."""
        self.pipeline.rest()

    def close(self) -> None:
        """End the pipeline, and give back what was kept. Idempotent."""
        self._kept.clear()
        self.pipeline.close()

    def _forget(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._kept.pop(layer, None)
