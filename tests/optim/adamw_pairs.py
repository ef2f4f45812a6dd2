# SPDX-License-Identifier: Apache-2.0
"""Optimizers with the same parameters and gradients each time, and their comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

SHAPES = [(5,), (3, 7), (2, 3, 17), ()]


def two_groups() -> list[dict[str, Any]]:
    """Parameters with the same values on each call, in two groups with settings of their own."""
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return [
        {"params": params[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": params[2:], "betas": (0.8, 0.95), "eps": 1e-5},
    ]


def params_of(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_gradients(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Gradients that depend on the number of the step only."""
    generator = torch.Generator().manual_seed(1000 + number)
    for param in params_of(optimizer):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        set_gradients(optimizer, number)
        optimizer.step()


def assert_close(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, steps: int = 50) -> None:
    """Compare parameters and moments.

    Each step rounds a parameter a few times at its own size, and an update, at most a few lr, a few
    times at its size; the errors of all steps may add up.
    """
    unit = 2.0**-23
    for group, their_group in zip(ours.param_groups, theirs.param_groups, strict=True):
        for a, b in zip(group["params"], their_group["params"], strict=True):
            atol = steps * 8 * unit * float(group["lr"])
            torch.testing.assert_close(a, b, rtol=steps * 2 * unit, atol=atol)
            assert ours.state[a].keys() == theirs.state[b].keys()
            for key in ours.state[a]:
                torch.testing.assert_close(
                    ours.state[a][key], theirs.state[b][key], rtol=steps * 2 * unit, atol=steps * unit
                )


def assert_identical(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    for x, y in zip(params_of(a), params_of(b), strict=True):
        assert torch.equal(x, y)
        assert all(torch.equal(a.state[x][key], b.state[y][key]) for key in b.state[y])
