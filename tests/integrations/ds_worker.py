# SPDX-License-Identifier: Apache-2.0
"""Runs in the child: one scenario, with the engine or with stock DeepSpeed."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch

TORCH_ADAM, CPU_ADAM = "torch_adam", "cpu_adam"


class Run:
    """What a scenario knows about its run, and the result of the process."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.ours: bool = job["mode"] == "ours"
        self.adam: str = job["adam"]
        self.rank: int = job["rank"]
        self.world: int = job["world"]
        self.tmp = Path(job["tmp"])
        self.log: list[tuple[str, str]] = []
        logger = logging.getLogger("peftds_ext")
        logger.setLevel(logging.INFO)
        logger.addHandler(_Collect(self.log))

    def config(self, dtype: str = "bf16", stage: int = 3, **changes: Any) -> dict[str, Any]:
        """Return a DeepSpeed configuration: CPU offload, AdamW, clipping 0.5, no accumulation.

        ``changes`` replace top-level keys; ``zero`` and ``adam`` add to the sections they name.
        """
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
        adam: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
        if not self.ours and self.adam == TORCH_ADAM:
            adam["torch_adam"] = True
        zero |= changes.pop("zero", {})
        adam |= changes.pop("adam_params", {})
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "steps_per_print": 10**9,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": adam},
        }
        if dtype != "fp32":
            config[dtype] = {"enabled": True}
        if self.ours:
            config["peftds_ext"] = {"enabled": True}
        config |= changes
        return {key: value for key, value in config.items() if value is not None}

    def initialize(self, model: torch.nn.Module, config: dict[str, Any], **kwargs: Any) -> Any:
        """Call ``deepspeed.initialize`` with the trainable parameters; return the engine."""
        import deepspeed

        if "optimizer" not in kwargs:
            kwargs.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
        engine = deepspeed.initialize(model=model, config=config, **kwargs)[0]
        if self.ours:
            check_ours(engine)
        return engine


class _Collect(logging.Handler):
    def __init__(self, records: list[tuple[str, str]]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.levelname, record.getMessage()))


def check_ours(engine: Any) -> None:
    """Make sure that a comparison is not between stock and stock."""
    name = type(engine.optimizer).__name__
    if engine.zero_optimization_stage() == 3 and name != "PeftdsZeroOptimizer_Stage3":
        raise AssertionError(f"the engine is not on: {name}")


def hook_layers() -> None:
    """Give stock DeepSpeed our hooks at layers, and nothing else of ours.

    Its own, at modules, split the graph, and gradients are summed in another order. What is compared with
    it, the way of gradients and the step, needs the same gradients.
    """
    importlib.import_module(
        "deepspeed.runtime.superoffload.superoffload_stage3"
    )  # derives from stock's class
    from deepspeed.runtime.zero import stage3

    from peftds_ext.integrations.deepspeed.stage3_layers import LayerHooks

    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    stage3.DeepSpeedZeroOptimizer_Stage3 = type(stock.__name__, (LayerHooks, stock), {})


def no_shared_memory_collectives() -> None:
    """Keep stock from compiling its CPU collectives, which only the time of the tests would notice."""
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def execute(job: dict[str, Any]) -> None:
    """Run the scenario that the job names and save what it returns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("default")
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True  # it is, by torch, on every CPU
    run = Run(job)
    if run.ours:
        import peftds_ext

        peftds_ext.install()
    elif job["mode"] == "stock":
        no_shared_memory_collectives()
        hook_layers()
    module, _, name = job["scenario"].partition(":")
    scenario = getattr(importlib.import_module(module), name)
    result = scenario(run, **job["arguments"])
    torch.save({"result": result, "log": run.log}, job["out"])
    if os.environ.get("WORLD_SIZE", "1") != "1" and torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody leaves while others still talk to it
