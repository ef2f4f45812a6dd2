# SPDX-License-Identifier: Apache-2.0
"""Plain torch modules streamed from files: results are those of a model in memory, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamed_models import Stack, Trainer, identical, make_engine, on_disk, steps, trained
from torch import nn

from peftds_ext.store.engine import StorageEngine
from peftds_ext.stream.module import ModuleStream

ALL = 1 << 30


def assert_same(
    drive: Callable[[Trainer], None], engine: StorageEngine, path: Path, budget: int, **model: Any
) -> ModuleStream:
    """Do the same with a model in memory and a streamed one; returns the stream, closed."""
    stack = Stack(**model)
    with ModuleStream(stack, on_disk(stack, path, engine), engine, budget) as stream:
        trainer = Trainer(stack)
        drive(trainer)
        assert identical(trainer.results, trained(drive, **model).results)
    return stream


# what a layer may do


@pytest.mark.parametrize("budget", [0, 20_000, ALL])
def test_training_is_that_of_a_model_in_memory(engine: StorageEngine, tmp_path: Path, budget: int) -> None:
    stream = assert_same(steps, engine, tmp_path / "base.safetensors", budget)
    uses = stream.pipeline.uses
    assert uses == 4 * (6 + 5)  # nothing of the first layer is needed in the backward pass
    if budget == ALL:
        assert uses - stream.pipeline.resident_uses <= 11 + 6  # all is known after the first pass
    else:
        assert stream.pipeline.resident_uses < uses - 12
    assert engine.arena.usage().live == 0


@pytest.mark.parametrize("budget", [0, 20_000, ALL])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_may_be_recomputed(
    engine: StorageEngine, tmp_path: Path, budget: int, reentrant: bool
) -> None:
    def drive(trainer: Trainer) -> None:
        trainer.model.reentrant = reentrant
        steps(trainer)
        trainer.step([0, 1, 1, 3])

    stream = assert_same(drive, engine, tmp_path / "base.safetensors", budget)
    assert stream.coordinator.entries > 5 * 3 * 6  # the recomputation enters as well


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("budget", [0, 30_000, ALL])
def test_a_layer_may_be_used_twice(
    engine: StorageEngine, tmp_path: Path, budget: int, reentrant: bool | None
) -> None:
    def drive(trainer: Trainer) -> None:
        trainer.model.reentrant = reentrant
        for route in ([0, 1, 1, 2, 3], [0, 0, 1, 2, 0], [3, 2, 3], [0, 1, 1, 2, 3]):
            trainer.step(route)

    assert_same(drive, engine, tmp_path / "base.safetensors", budget)


@given(
    routes=st.lists(st.lists(st.integers(0, 3), max_size=7), min_size=2, max_size=6),
    budget=st.integers(0, 60_000),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layers_may_come_in_any_order(
    engine: StorageEngine, tmp_path: Path, routes: list[list[int]], budget: int
) -> None:
    def drive(trainer: Trainer) -> None:
        for route in routes:
            trainer.step(route)

    assert_same(drive, engine, tmp_path / "base.safetensors", budget)


@pytest.mark.parametrize("budget", [0, ALL])
def test_an_operator_may_save_a_view_of_a_weight(engine: StorageEngine, tmp_path: Path, budget: int) -> None:
    def drive(trainer: Trainer) -> None:
        for block in trainer.model.blocks:
            block.saves_view = True
        steps(trainer)

    assert_same(drive, engine, tmp_path / "base.safetensors", budget)


@pytest.mark.parametrize("budget", [0, 20_000, ALL])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_evaluation_may_come_before_and_between_steps(
    engine: StorageEngine, tmp_path: Path, budget: int, mode: Any
) -> None:
    def drive(trainer: Trainer) -> None:
        for _ in range(3):
            with mode():
                trainer.evaluate()
                trainer.evaluate()
            trainer.step()

    assert_same(drive, engine, tmp_path / "base.safetensors", budget)


def test_a_forward_may_come_between_another_and_its_backward(engine: StorageEngine, tmp_path: Path) -> None:
    def drive(trainer: Trainer) -> None:
        for _ in range(3):
            loss = trainer.model(trainer.inputs()).square().mean()
            with torch.no_grad():
                trainer.evaluate()
            loss.backward()
            trainer.optimizer.step()
            trainer.results += [p.detach().clone() for p in trainer.trained]

    assert_same(drive, engine, tmp_path / "base.safetensors", 20_000)


@pytest.mark.parametrize("budget", [0, 20_000, ALL])
@pytest.mark.parametrize("failing", [0, 2, 3])
def test_training_goes_on_after_an_exception_in_mid_forward(
    engine: StorageEngine, tmp_path: Path, budget: int, failing: int
) -> None:
    def fail(block: nn.Module) -> None:
        raise RuntimeError("on purpose")

    def drive(trainer: Trainer) -> None:
        for number in range(4):
            block = trainer.model.blocks[failing]
            if number % 2:
                block.before = fail
                with pytest.raises(RuntimeError, match="on purpose"):
                    trainer.step()
                block.before = lambda block: None
            trainer.step()

    assert_same(drive, engine, tmp_path / "base.safetensors", budget)


class Nested(nn.Module):
    """Has a weight that it uses before and after one inside uses it as well, and others of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.own = nn.Parameter(torch.randn(8), requires_grad=False)
        self.inner = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(3))
        self.inner[1].weight = self.shared
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = (inputs * self.scale) @ self.shared
        for layer in self.inner:
            hidden = layer(hidden).tanh()
        return (hidden @ self.shared) * self.own


@pytest.mark.parametrize("budget", [0, 9_000, ALL])
def test_a_shared_weight_stays_while_any_layer_uses_it(
    engine: StorageEngine, tmp_path: Path, budget: int
) -> None:
    def train(model: Nested) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW([model.scale], lr=0.05)
        results = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            loss = model(torch.randn(5, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results += [loss.detach(), model.scale.detach().clone()]
        return results

    model = Nested()
    sources = on_disk(model, tmp_path / "base.safetensors", engine)
    assert sources.keys() >= {"shared", "own", "inner.0.weight"}
    with ModuleStream(model, sources, engine, budget):
        assert identical(train(model), train(Nested()))


# memory, and calls


@given(
    inner=st.lists(st.integers(1, 900), min_size=2, max_size=6),
    share=st.floats(0, 1.2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    routes=st.lists(st.lists(st.integers(0, 5), max_size=9), min_size=1, max_size=4),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_memory_is_the_budget_and_two_layers(
    tmp_path: Path, inner: list[int], share: float, dtype: torch.dtype, routes: list[list[int]]
) -> None:
    """Where the order changes, what was on its way may be there beside what is kept."""
    engine, stack = make_engine(), Stack(inner, dtype)
    sources = on_disk(stack, tmp_path / "base.safetensors", engine, torch.float32)
    budget = int(share * sum(source.numel * source.dtype.itemsize for source in sources.values()))
    with ModuleStream(stack, sources, engine, budget) as stream:
        trainer, seen = Trainer(stack), []
        for block in stack.blocks:  # a layer is in use, and what is read for the next ones is on its way
            block.before = lambda block: seen.append(engine.arena.usage().live)
        for route in routes:
            for _ in range(3):
                seen.clear()
                trainer.step([number % len(inner) for number in route])
            largest = max(stream.pipeline.read_sizes)  # in use, and read for its next use meanwhile
            assert max(seen, default=0) <= budget + 2 * largest
        assert 0 < engine.arena.usage().peak_live <= 2 * budget + 3 * largest
    engine.close()


def test_a_layer_enters_python_twice_in_a_pass(engine: StorageEngine, tmp_path: Path) -> None:
    stack = Stack()
    with ModuleStream(stack, on_disk(stack, tmp_path / "base.safetensors", engine), engine, 0) as stream:
        loss = stack(Trainer(stack).inputs()).sum()
        assert stream.coordinator.entries == 2 * 6
        loss.backward()
        assert 2 * 6 < stream.coordinator.entries <= 3 * 6
