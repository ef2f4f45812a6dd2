# SPDX-License-Identifier: Apache-2.0
"""DeepSpeedCPUAdam alone, and the chain of passes that stock ZeRO-3 makes around it.

The chain follows ``deepspeed/runtime/zero/stage3.py`` of 0.19.8 statement by statement:
``_offload_grad_partition_at_boundary`` (in backward), ``unscale_and_clip_grads``, ``_optimizer_step``
and ``_reassign_or_swap_out_partitioned_parameters`` (in ``step``). The fp64 norm and the copies between
gradient, bucket and host buffer are left out here; ``bench_engine_step.py`` has them.
"""

from __future__ import annotations

from typing import Any

import torch
from interleave import Contender, NotMeasured, timed
from problem import BETAS, EPS, GRAD_SCALE, LR, WEIGHT_DECAY, Entry, Problem

from baselines.deepspeed_build import prepare_environment, root_cause


def cpu_adam_class() -> Any:
    """Return DeepSpeedCPUAdam with its op loaded; DeepSpeed compiles the op on first use.

    Raises:
        NotMeasured: DeepSpeed is not installed, or its op can be neither loaded nor built.
    """
    prepare_environment()
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as error:
        raise NotMeasured(f"DeepSpeed cannot be imported: {error}") from error
    try:
        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])
    except (RuntimeError, ImportError, OSError) as error:
        raise NotMeasured(
            f"DeepSpeed's cpu_adam op cannot be loaded or built: {root_cause(error)}"
        ) from error
    return DeepSpeedCPUAdam


def _optimizer(master: torch.nn.Parameter) -> Any:
    return cpu_adam_class()([master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True)


def alone(problem: Problem) -> Entry:
    """``DeepSpeedCPUAdam.step`` with fp32 gradients."""
    master = torch.nn.Parameter(problem.start.clone())
    optimizer = _optimizer(master)
    master.grad = problem.grad.float()
    return Entry(Contender("deepspeed_adam", timed({"adam": optimizer.step})), master.detach())


def chain(problem: Problem) -> Entry:
    """All passes of stock ZeRO-3 from a bf16 gradient to a bf16 weight."""
    master = torch.nn.Parameter(problem.start.clone())
    optimizer = _optimizer(master)
    grad_fp32 = torch.zeros_like(problem.start)
    master.grad = grad_fp32
    grad = problem.grad * GRAD_SCALE
    weight = torch.empty_like(problem.grad)
    combined_scale = torch.tensor(GRAD_SCALE)  # with clipping on, stock's factor is a tensor
    steps = {
        "hand_over": lambda: grad_fp32.copy_(grad.to(dtype=torch.float32), non_blocking=True),
        "unscale": lambda: grad_fp32.mul_(1.0 / combined_scale),
        "adam": optimizer.step,
        "write_back": lambda: weight.copy_(master.data),
    }
    return Entry(Contender("deepspeed_chain", timed(steps)), master.detach(), weight)
