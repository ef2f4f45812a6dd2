# SPDX-License-Identifier: Apache-2.0
"""Our step, in the two forms that are compared."""

from __future__ import annotations

import itertools

import torch
from interleave import Contender, timed
from problem import BETAS, EPS, GRAD_SCALE, LR, WEIGHT_DECAY, Entry, Problem
from torch import Tensor

from peftds_ext import ops


def _entry(name: str, problem: Problem, grad: Tensor, weight: Tensor | None, grad_scale: float) -> Entry:
    master = problem.start.clone()
    exp_avg, exp_avg_sq = torch.zeros_like(master), torch.zeros_like(master)
    steps = itertools.count(1)

    def step() -> None:
        ops.adamw_step_(
            master,
            grad,
            exp_avg,
            exp_avg_sq,
            weight,
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            step=next(steps),
            grad_scale=grad_scale,
        )

    return Entry(Contender(name, timed({"step": step})), master, weight)


def fp32(problem: Problem) -> Entry:
    """fp32 gradients, no low-precision weight."""
    return _entry("ours_fp32", problem, problem.grad.float(), None, 1.0)


def bf16(problem: Problem) -> Entry:
    """bf16 scaled gradients, unscaled in the pass; bf16 weight written in the same pass."""
    grad = problem.grad * GRAD_SCALE
    weight = torch.empty_like(problem.grad)
    return _entry("ours_bf16", problem, grad, weight, 1.0 / GRAD_SCALE)
