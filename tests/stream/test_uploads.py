# SPDX-License-Identifier: Apache-2.0
"""Layers copied to a device ahead of their use, with a device that copies as late, or as early, as it may."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lazy_device import LazyDevice
from streamed_models import Stack, Trainer, identical, on_disk, steps, trained
from torch import Tensor

from peftds_ext.errors import StorageError
from peftds_ext.store.engine import StorageEngine
from peftds_ext.stream.module import ModuleStream
from peftds_ext.stream.uploads import Uploads

ALL = 1 << 30
PACES: dict[str, dict[str, Any]] = {"lazy": {}, "eager": {"eager": True}, "behind": {"lag": 40}}


class InMemory:
    """Layers that are all in host memory."""

    def __init__(self, layers: list[list[Tensor]], *, transient: bool = False) -> None:
        self.layers, self.transient = layers, transient
        self.fetched: list[int] = []
        self.expected: list[int] = []
        self.given: list[list[weakref.ref[Tensor]]] = []
        self.ready = True
        self.failure: Exception | None = None

    def shapes(self, layer: int) -> list[tuple[int, torch.dtype]]:
        return [(tensor.numel(), tensor.dtype) for tensor in self.layers[layer]]

    def is_ready(self, layer: int) -> bool:
        return self.ready

    def make_room(self, layer: int) -> None:
        pass

    def is_transient(self, layer: int) -> bool:
        return self.transient

    def fetch(self, layer: int) -> list[Tensor]:
        self.fetched.append(layer)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if not self.transient:
            return self.layers[layer]
        read = [tensor.clone() for tensor in self.layers[layer]]
        self.given.append([weakref.ref(tensor) for tensor in read])
        return read

    def begin_pass(self, expected: Sequence[int]) -> None:
        self.expected = list(expected)
        self.fetched.clear()

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


def layers_of(count: int) -> list[list[Tensor]]:
    return [
        [torch.full((100 + layer,), float(layer)), torch.full((7,), layer, dtype=torch.bfloat16)]
        for layer in range(count)
    ]


class Run:
    """Uses layers of an ``InMemory`` one after another, as a model's pass does."""

    def __init__(self, host: InMemory, device: LazyDevice, budget: int = 0) -> None:
        self.host, self.device = host, device
        self.uploads = Uploads(host, device, len(host.layers), budget)
        self.held: dict[int, list[Tensor]] = {}

    def use(self, layer: int) -> None:
        for other in self.uploads.make_room(layer):
            self.held.pop(other, None)
        tensors = self.uploads.enter(layer, resident=layer in self.held)
        self.held.setdefault(layer, tensors)
        del tensors
        for ours, theirs in zip(self.held[layer], self.host.layers[layer], strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        for other in self.uploads.leave(layer):
            self.held.pop(other, None)

    def go(self, order: list[int], passes: int = 3) -> None:
        for _ in range(passes):
            self.uploads.begin_pass()
            for layer in order:
                self.use(layer)
            self.uploads.rest()


SWEEP = [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("budget", [0, 1024, ALL])
def test_layers_come_ahead_of_their_use_and_the_host_never_waits(pace: str, budget: int) -> None:
    run = Run(InMemory(layers_of(4)), LazyDevice(**PACES[pace]), budget)
    run.go(SWEEP, passes=5)
    counts = run.uploads.counts
    assert run.device.finished == []
    assert counts.waits == 0
    assert counts.vain == 0
    assert counts.demanded == 1 if budget == ALL else counts.demanded <= 5  # a pass's first layer at most
    assert run.device.peak <= 2 * max(run.uploads.sizes) + budget
    if budget == ALL:
        assert counts.bytes == sum(t.nbytes for tensors in run.host.layers for t in tensors)
    run.uploads.close()


@pytest.mark.parametrize("budget", [0, 600, 1500, ALL])
def test_the_host_is_told_what_is_going_to_be_fetched(budget: int) -> None:
    run = Run(InMemory(layers_of(4)), LazyDevice(), budget)
    # After an evaluation it is no more than likely where some of the layers stay.
    evaluation = [SWEEP[:4]] if budget in (0, ALL) else []
    for order in (SWEEP, SWEEP, *evaluation, SWEEP, SWEEP):
        run.go(order, passes=1)
        assert order is not SWEEP or run.host.expected == run.host.fetched
    if budget == 0:  # the turn keeps the last layer even then, and the end the first
        assert run.host.fetched == [1, 2, 3, 2, 1, 0]


def test_at_most_one_layer_is_copied_where_host_memory_is_short() -> None:
    run = Run(InMemory(layers_of(4), transient=True), LazyDevice(lag=1 << 20))
    for order in (SWEEP, [0, 2, 1], SWEEP):
        run.uploads.begin_pass()
        for layer in order:
            run.use(layer)
            held = [upload for upload in run.host.given if not all(tensor() is None for tensor in upload)]
            assert len(held) <= 1
    assert run.uploads.counts.waits == len(run.device.finished) > 0
    run.uploads.close()


def test_what_was_copied_ahead_is_not_used_in_another_pass() -> None:
    run = Run(InMemory(layers_of(4)), LazyDevice(eager=True))
    run.go(SWEEP, passes=1)
    run.uploads.begin_pass()
    run.use(0)  # copies 1 ahead
    run.held.clear()
    run.host.layers[1][0].add_(1)
    run.uploads.begin_pass()
    run.use(0)
    run.use(1)


def test_a_copy_is_not_begun_before_its_layer_was_read() -> None:
    run = Run(InMemory(layers_of(3)), LazyDevice())
    run.host.ready = False
    run.go([0, 1, 2, 2, 1, 0], passes=1)
    assert run.uploads.counts.ready == 0
    assert run.uploads.counts.demanded == len(run.host.fetched)


def test_a_failed_read_is_told_at_the_layer_that_needed_it() -> None:
    run = Run(InMemory(layers_of(3)), LazyDevice())
    run.uploads.begin_pass()
    run.host.failure = None
    run.use(0)  # has copied 1
    run.host.failure = StorageError("no such luck")
    run.use(1)  # tries 2, which fails
    with pytest.raises(StorageError, match="no such luck"):
        run.use(2)
    run.use(2)


@given(
    passes=st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=2, max_size=6),
    budget=st.integers(0, 3000),
    transient=st.booleans(),
    pace=st.sampled_from(list(PACES)),
)
@settings(max_examples=60, deadline=None)
def test_any_order_gets_what_it_needs_within_the_budget(
    passes: list[list[int]], budget: int, transient: bool, pace: str
) -> None:
    run = Run(InMemory(layers_of(4), transient=transient), LazyDevice(**PACES[pace]), budget)
    for order in passes:
        run.go(order, passes=1)
    assert run.device.peak <= 2 * 1024 + budget
    run.uploads.close()
    run.held.clear()
    assert run.device.live == 0


def test_events_tell_copies_and_stalls() -> None:
    run = Run(InMemory(layers_of(3)), LazyDevice(eager=True))
    run.go([0, 1, 2, 2, 1, 0], passes=1)
    events = run.uploads.drain()
    copies = [event for event in events if event.kind == "copy"]
    assert [event.layer for event in copies] == run.host.fetched
    assert sum(event.bytes for event in copies) == run.uploads.counts.bytes
    assert all(event.start <= event.end for event in events)
    assert {event.kind for event in events} == {"copy", "stall"}
    assert run.uploads.drain() == []


# from files, through host memory


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("device_budget", [0, 6000, ALL])
@pytest.mark.parametrize("budget", [0, 20_000, ALL])
def test_training_is_that_of_a_model_in_memory(
    engine: StorageEngine, tmp_path: Path, budget: int, device_budget: int, pace: str
) -> None:
    stack, device = Stack(), LazyDevice(**PACES[pace])
    sources = on_disk(stack, tmp_path / "base.safetensors", engine)
    with ModuleStream(stack, sources, engine, budget, device_budget=device_budget, device=device) as stream:
        trainer = Trainer(stack)
        steps(trainer)
        trainer.evaluate()
        steps(trainer)
        assert stream.uploads is not None
        largest_on_device = max(stream.uploads.sizes)
        assert device.peak <= 2 * largest_on_device + device_budget
        if budget < ALL:
            assert engine.arena.usage().peak_live <= 2 * max(stream.pipeline.sizes) + budget

    def drive(trainer: Trainer) -> None:
        steps(trainer)
        trainer.evaluate()
        steps(trainer)

    assert identical(trainer.results, trained(drive).results)
    assert engine.arena.usage().live == 0
    del trainer, stack, stream
    assert device.live == 0


@given(
    routes=st.lists(st.lists(st.integers(0, 3), max_size=7), min_size=2, max_size=5),
    budget=st.integers(0, 60_000),
    device_budget=st.integers(0, 20_000),
    reentrant=st.sampled_from([None, False, True]),
    pace=st.sampled_from(list(PACES)),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_route_is_that_of_a_model_in_memory(
    engine: StorageEngine,
    tmp_path: Path,
    routes: list[list[int]],
    budget: int,
    device_budget: int,
    reentrant: bool | None,
    pace: str,
) -> None:
    def drive(trainer: Trainer) -> None:
        trainer.model.reentrant = reentrant
        for route in routes:
            trainer.step(route)

    stack, device = Stack(), LazyDevice(**PACES[pace])
    sources = on_disk(stack, tmp_path / "base.safetensors", engine)
    with ModuleStream(stack, sources, engine, budget, device_budget=device_budget, device=device):
        trainer = Trainer(stack)
        drive(trainer)
    assert identical(trainer.results, trained(drive).results)
