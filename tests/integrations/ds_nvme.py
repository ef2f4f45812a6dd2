# SPDX-License-Identifier: Apache-2.0
"""What the tests of parameters on NVMe share, with one rank and with two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ds_models import masters
from ds_worker import Run
from torch import Tensor

VOCABULARY = 2048
LARGE_ADAPTER = {"r": 1024, "target_modules": ["q_proj"]}
"""Adapters of 524,288 elements: 1 MiB in bf16, which is where partitions begin to be swapped."""


def shape_for_disk(**changes: Any) -> Any:
    """Return a Llama whose embeddings and MLP are large enough for the disk, and its attention is not."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def lora_on(model: Any, *, fp32_adapters: bool = True, **changes: Any) -> Any:
    """Adapt a model; DeepSpeed leaves fp32 adapters as they are where the base is partitioned already."""
    import peft

    torch.manual_seed(1)
    options = {"r": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **changes}
    return peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=fp32_adapters)


def batches(count: int, rank: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3 + rank)
    return [torch.randint(0, VOCABULARY, (2, 16), generator=generator) for _ in range(count)]


def configured(
    run: Run, device: str, path: Path, zero: dict[str, Any], offload: dict[str, Any], **changes: Any
) -> Any:
    on_disk = {"nvme_path": str(path), **offload} if device == "nvme" else {}
    return run.config(zero={**zero, "offload_param": {"device": device, **on_disk}}, **changes)


def placement(engine: Any) -> dict[str, int]:
    """Return how many partitions lie on the disk, of frozen and of trainable parameters."""
    found = {"frozen": 0, "trainable": 0, "memory": 0}
    for parameter in engine.module.parameters():
        on_disk = str(getattr(parameter.ds_tensor.final_location, "value", "")) == "nvme"
        found[("trainable" if parameter.requires_grad else "frozen") if on_disk else "memory"] += 1
    return found


def swapper_of(engine: Any) -> Any:
    return next(parameter.nvme_swapper for parameter in engine.module.parameters())


def train_step(engine: Any, batch: Tensor) -> float:
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def result_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    usage = swapper_of(engine)._engine.arena.usage() if swapper_of(engine) is not None else None
    return {
        "losses": losses,
        "masters": masters(engine),
        "placement": placement(engine),
        "memory": (usage.peak_live, usage.peak_held) if usage else None,
    }
