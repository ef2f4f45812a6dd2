# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny model with DeepSpeed on two CPU ranks and reports the bytes of each model state on rank 0.

Usage: ``deepspeed_states.py PORT CASES.json RESULT.json``. A case is ``[stage, dtype, grad_dtype or null,
offload_optimizer, offload_param]``. Devices cannot be told apart on the CPU accelerator, so the result of a
case is one number per state, over all places.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

RANKS = 2
WIDTH, LAYERS, FROZEN_LAYERS = 64, 6, 3


def nbytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def build_model() -> torch.nn.Sequential:
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers[:FROZEN_LAYERS]:
        layer.weight.requires_grad_(False)
    return torch.nn.Sequential(*layers)


def ds_config(stage: int, dtype: str, grad_dtype: str | None, optimizer: bool, param: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
    }
    if grad_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": grad_dtype}
    return config


def gradients_during_backward(params: list[Any]) -> int:
    """Bytes of the gradients that the parameters hold themselves, in either form."""
    return nbytes(p.grad for p in params) + nbytes(getattr(p, "grad_accum", None) for p in params)


def held_gradients(zero: Any, stage: int, params: list[Any], seen: dict[str, int]) -> int:
    """Bytes of gradients between backward and step."""
    if stage == 0:
        return nbytes(p.grad for p in params)
    if stage == 3:
        return nbytes([zero.grad_partitions_flat_buffer]) + nbytes(
            t.grad for t in zero.fp32_partitioned_groups_flat if zero.offload_optimizer
        )
    if hasattr(zero, "fp32_groups_gradients_flat"):
        return nbytes(zero.fp32_groups_gradients_flat) + nbytes(p.grad for p in params)
    offloaded = nbytes(t.grad for t in zero.single_partition_of_fp32_groups)
    if stage == 1:
        return seen["before_reduction"] + offloaded
    return offloaded + nbytes(t for group in zero.averaged_gradients.values() for t in group or [])


def master_tensors(zero: Any) -> list[Any]:
    for name in (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups",
    ):
        if hasattr(zero, name):
            groups = getattr(zero, name)
            return [t for group in groups for t in (group if isinstance(group, list) else [group])]
    return []


def measure(case: list[Any]) -> dict[str, int]:
    import deepspeed

    stage = case[0]
    model = build_model()
    client = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine, zero, *_ = deepspeed.initialize(model=model, optimizer=client, config=ds_config(*case))
    params = list(engine.module.parameters())
    seen: dict[str, int] = {}
    if stage == 1 and hasattr(zero, "reduce_gradients"):
        reduce = zero.reduce_gradients

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen["before_reduction"] = gradients_during_backward(params)
            return reduce(*args, **kwargs)

        zero.reduce_gradients = watched
    batch = torch.randn(1, WIDTH, dtype=params[0].dtype)
    gradients = 0
    for _ in range(2):
        engine.backward(engine(batch).float().pow(2).mean())
        gradients = held_gradients(zero, stage, params, seen)
        engine.step()
    parameters = [p.ds_tensor if stage == 3 else p for p in params]
    parameters += getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    moments = getattr(zero, "optimizer", zero).state.values()
    result = {
        "parameters": nbytes(parameters),
        "gradients": gradients,
        "master": nbytes(master_tensors(zero)),
        "exp_avg": nbytes(state["exp_avg"] for state in moments),
        "exp_avg_sq": nbytes(state["exp_avg_sq"] for state in moments),
    }
    engine.destroy()
    return result


def run_rank(rank: int, port: str, cases: list[list[Any]], result: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(rank),
        LOCAL_SIZE=str(RANKS),
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    measured = [measure(case) for case in cases]
    if rank == 0:
        Path(result).write_text(json.dumps(measured))


if __name__ == "__main__":
    _, port, cases_path, result_path = sys.argv
    cases = json.loads(Path(cases_path).read_text())
    torch.multiprocessing.spawn(run_rank, (port, cases, result_path), nprocs=RANKS)
