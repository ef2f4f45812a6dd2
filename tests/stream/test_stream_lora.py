# SPDX-License-Identifier: Apache-2.0
"""A Llama with LoRA whose base is streamed from its checkpoint, against one that is in memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_models import identical, saved
from torch import Tensor

from peftds_ext.store.engine import StorageEngine
from peftds_ext.stream.module import ModuleStream
from peftds_ext.stream.sources import sources_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing.*is deprecated:FutureWarning")

STEPS, ALL = 4, 1 << 30


def base(stored: torch.dtype, tied: bool) -> Any:
    """Return a model as its checkpoint holds it."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(stored)


def with_lora(model: Any, checkpointing: str) -> Any:
    """Add adapters, and checkpointing of gradients of one of its two kinds."""
    torch.manual_seed(8)
    config = peft.LoraConfig(r=2, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config)
    if checkpointing:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        assert adapted.is_gradient_checkpointing
    return adapted.train()


def train(model: Any) -> list[Tensor]:
    """Return the losses, and the adapters afterwards."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    torch.manual_seed(9)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 48, (2, 12))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[0] != losses[-1]
    return [*losses, *(p.detach() for p in trained)]


@functools.cache
def in_memory(dtype: torch.dtype, stored: torch.dtype, checkpointing: str, tied: bool) -> list[Tensor]:
    return train(with_lora(base(stored, tied).to(dtype), checkpointing))


def streamed(
    engine: StorageEngine,
    path: Path,
    budget: float,
    dtype: torch.dtype,
    stored: torch.dtype,
    kind: str,
    tied: bool,
) -> tuple[list[Tensor], ModuleStream]:
    """Train with the base in its file; ``budget`` is a share of it."""
    model = base(stored, tied)
    checkpoint = saved(model, path)
    model.to(dtype)
    names = {parameter: name for name, parameter in model.named_parameters()}
    nbytes = sum(p.numel() * p.dtype.itemsize for p in names)
    adapted = with_lora(model, kind)
    renamed = {name: checkpoint[names[p]] for name, p in adapted.named_parameters() if p in names}
    sources = sources_of(renamed, adapted, engine)
    assert len(sources) == len(names)
    with ModuleStream(adapted, sources, engine, int(budget * nbytes)) as stream:
        results = train(adapted)
        largest = max(stream.pipeline.read_sizes)
        assert engine.arena.usage().peak_live <= 2 * int(budget * nbytes) + 3 * largest
        assert engine.arena.usage().live <= int(budget * nbytes) + 2 * largest
    return results, stream


@pytest.mark.parametrize("budget", [0, 0.25, 1.5])
@pytest.mark.parametrize("checkpointing", ["", "reentrant", "non-reentrant"])
def test_training_is_that_of_a_model_in_memory(
    engine: StorageEngine, tmp_path: Path, budget: float, checkpointing: str
) -> None:
    kind = (torch.bfloat16, torch.float32, checkpointing, False)
    ours, stream = streamed(engine, tmp_path / "model.safetensors", budget, *kind)
    assert identical(ours, in_memory(*kind))
    layers = len(stream.pipeline.sizes)
    assert layers == 7
    assert stream.coordinator.entries <= STEPS * 3 * layers  # what recomputes is inside of the layers here


@pytest.mark.parametrize("budget", [0, 0.25, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_may_be_used_as_they_are(
    engine: StorageEngine, tmp_path: Path, budget: float, dtype: torch.dtype
) -> None:
    kind = (dtype, dtype, "", False)
    ours, _ = streamed(engine, tmp_path / "model.safetensors", budget, *kind)
    assert identical(ours, in_memory(*kind))


@pytest.mark.parametrize("budget", [0, 0.25, 1.5])
@pytest.mark.parametrize("checkpointing", ["", "non-reentrant"])
def test_embeddings_may_be_tied(
    engine: StorageEngine, tmp_path: Path, budget: float, checkpointing: str
) -> None:
    kind = (torch.bfloat16, torch.float32, checkpointing, True)
    ours, _ = streamed(engine, tmp_path / "model.safetensors", budget, *kind)
    assert identical(ours, in_memory(*kind))


def test_generation_calls_an_inner_model(engine: StorageEngine, tmp_path: Path) -> None:
    model = with_lora(base(torch.float32, tied=False), "").eval()
    prompt = torch.arange(5)[None]
    sample = functools.partial(prompt_continued, prompt=prompt)
    expected = sample(model)
    frozen = base(torch.float32, tied=False)
    checkpoint = saved(frozen, tmp_path / "model.safetensors")
    names = {parameter: name for name, parameter in frozen.named_parameters()}
    adapted = with_lora(frozen, "").eval()
    renamed = {name: checkpoint[names[p]] for name, p in adapted.named_parameters() if p in names}
    with ModuleStream(adapted, sources_of(renamed, adapted, engine), engine, 0) as stream:
        assert torch.equal(sample(adapted), expected)
        assert stream.pipeline.records <= 2  # a pass for each token, all alike
        assert engine.arena.usage().peak_live <= sum(sorted(stream.pipeline.read_sizes)[-2:])


def prompt_continued(model: Any, prompt: Tensor) -> Tensor:
    tokens: Tensor = model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return tokens
