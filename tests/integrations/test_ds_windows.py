# SPDX-License-Identifier: Apache-2.0
"""What counts as the gradient of a step, against plain torch: here stock DeepSpeed is wrong or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_models import Mlp, adamw_by_torch, furthest, masters, rows
from ds_runner import Runner
from ds_worker import Run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Losses = list[list[Callable[[nn.Module], Tensor]]]


def _train(run: Run, model: nn.Module, windows: Losses, **changes: Any) -> dict[str, Tensor]:
    accumulation = len(windows[0])
    config = run.config("fp32", gradient_accumulation_steps=accumulation, **changes)
    engine = run.initialize(model, config)
    for window in windows:
        for loss in window:
            engine.backward(loss(engine))
            engine.step()
    return masters(engine)


def _compare(run: Run, build: Callable[[], nn.Module], windows: Losses, clip: float = 0.5) -> float:
    ours = _train(run, build(), windows, gradient_clipping=clip)
    return furthest(ours, adamw_by_torch(build(), windows, clip=clip))


def parameter_without_gradient(run: Run, clip: float) -> float:
    def loss(number: int, skip: bool) -> Callable[[nn.Module], Tensor]:
        return lambda model: model(rows(8)[number], skip=skip)

    # Used throughout, in one half of a window, not at all, and again.
    skips = [(False, False), (True, False), (True, True), (False, True)]
    windows = [[loss(2 * i, first), loss(2 * i + 1, second)] for i, (first, second) in enumerate(skips)]
    return _compare(run, Mlp, windows, clip)


class Shared(nn.Module):
    """One layer in two checkpointed regions, so that it gets its gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.entry = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(2):
            x = x + checkpoint(self.mlp.optional, x, use_reentrant=True).tanh()
        return self.mlp(x, skip=True)


def layer_in_two_reentrant_regions(run: Run) -> float:
    def loss(number: int) -> Callable[[nn.Module], Tensor]:
        return lambda model: model(rows(6)[number])

    return _compare(run, Shared, [[loss(2 * i), loss(2 * i + 1)] for i in range(3)])


def zero_grad_in_the_window(run: Run) -> float:
    engine = run.initialize(Mlp(), run.config("fp32", gradient_accumulation_steps=2))
    x = rows(4)
    for number in range(2):
        engine.backward(engine(x[2 * number]))
        engine.optimizer.zero_grad()  # drops what came before, for `optional` for good
        engine.step()
        engine.backward(engine(x[2 * number + 1], skip=True))
        engine.step()
    dropped = [
        [lambda model: model(x[0]) * 0.0, lambda model: model(x[1], skip=True)],
        [lambda model: model(x[2]) * 0.0, lambda model: model(x[3], skip=True)],
    ]
    return furthest(masters(engine), adamw_by_torch(Mlp(), dropped, clip=0.5))


def two_forwards_before_two_backwards(run: Run) -> float:
    engine = run.initialize(Mlp(), run.config("fp32"))
    x = rows(4)
    for i in (0, 2):
        first, second = engine(x[i]), engine(x[i + 1])
        engine.backward(second)
        engine.backward(first)
        engine.step()
    windows: Losses = [[lambda model, i=i: model(x[i]) + model(x[i + 1])] for i in (0, 2)]
    return furthest(masters(engine), adamw_by_torch(Mlp(), windows, clip=0.5))


def coalesced_reduction(run: Run) -> float:
    engine = run.initialize(Mlp(), run.config("fp32"))
    x = rows(4)
    for i in (0, 2):
        with engine.coalesce_grad_reduction():
            engine.backward(engine(x[i]))
            engine.backward(engine(x[i + 1], skip=True))
        engine.step()
    windows: Losses = [[lambda model, i=i: model(x[i]) + model(x[i + 1], skip=True)] for i in (0, 2)]
    return furthest(masters(engine), adamw_by_torch(Mlp(), windows, clip=0.5))


def accumulation_by_the_caller(run: Run) -> float:
    engine = run.initialize(Mlp(), run.config("fp32", managed_gradient_accumulation=False))
    x = rows(4)
    for window in (x[:3], x[3:]):
        for part in window:
            engine.backward(engine(part, skip=part is x[1]))
        engine.step()

    def loss(model: nn.Module, window: list[Tensor]) -> Tensor:
        return torch.stack([model(part, skip=part is x[1]) for part in window]).sum()

    windows: Losses = [[lambda model: loss(model, x[:3])], [lambda model: loss(model, x[3:])]]
    return furthest(masters(engine), adamw_by_torch(Mlp(), windows, clip=0.5))


def backward_of_the_loss(run: Run) -> float:
    engine = run.initialize(Mlp(), run.config("fp32", gradient_accumulation_steps=2))
    for x in rows(4):
        engine.scale(engine(x)).backward()
        engine.step()
    x = rows(4)
    windows: Losses = [[lambda model, i=i + j: model(x[i]) for j in range(2)] for i in (0, 2)]
    return furthest(masters(engine), adamw_by_torch(Mlp(), windows, clip=0.5))


def eval_between_steps(run: Run) -> float:
    windows: Losses = [[lambda model, x=x: model(x)] for x in rows(3)]
    engine = run.initialize(Mlp(), run.config("fp32"))
    for window in windows:
        engine.eval()
        with torch.no_grad():
            engine(rows(1)[0])
        engine.train()
        engine.backward(window[0](engine))
        with torch.no_grad():
            engine(rows(1)[0], skip=True)  # between backward and step
        engine.step()
    return furthest(masters(engine), adamw_by_torch(Mlp(), windows, clip=0.5))


# fp32 throughout; each of 3 or 4 steps moves a weight of up to 0.25 by 1e-3 and rounds it once.
LAST_BITS = 5e-7


@pytest.mark.parametrize("clip", [0.0, 0.5, 0.01])
def test_parameter_without_gradient_counts_as_zero(runner: Runner, clip: float) -> None:
    assert runner.one(parameter_without_gradient, clip=clip).result <= LAST_BITS


@pytest.mark.parametrize(
    "scenario",
    [
        layer_in_two_reentrant_regions,
        zero_grad_in_the_window,
        two_forwards_before_two_backwards,
        coalesced_reduction,
        accumulation_by_the_caller,
        backward_of_the_loss,
        eval_between_steps,
    ],
)
def test_gradients_are_those_of_torch(runner: Runner, scenario: Callable[..., Any]) -> None:
    assert runner.one(scenario).result <= LAST_BITS
