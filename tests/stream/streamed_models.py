# SPDX-License-Identifier: Apache-2.0
"""Small models with a frozen base, their files, and runs whose results are compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peftds_ext.store.checkpoint import CheckpointTensor, read_checkpoint
from peftds_ext.store.engine import IoSettings, StorageEngine
from peftds_ext.store.records import Source
from peftds_ext.stream.sources import sources_of

WIDTH = 8


def make_engine() -> StorageEngine:
    return StorageEngine(IoSettings(None, 4, 64 << 10, direct=True, checksum="off"))


class SavesView(torch.autograd.Function):
    """A linear map that keeps a transposed view of its weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.view = weight.t()
        return inputs @ ctx.view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.view.t(), None


class Block(nn.Module):
    """Frozen but for a scale. ``before`` is called when its forward has begun."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.before: Callable[[Block], None] = lambda block: None
        self.saves_view = False

    def forward(self, inputs: Tensor) -> Tensor:
        self.before(self)
        hidden = nn.functional.gelu(self.up(self.norm(inputs)))
        out = SavesView.apply(hidden, self.down.weight) if self.saves_view else self.down(hidden)
        return inputs + out * self.scale


class Stack(nn.Module):
    """Blocks in the order of ``route``, checkpointed unless ``reentrant`` is None."""

    def __init__(self, inner: Sequence[int] = (64, 64, 64, 64), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(size) for size in inner)
        self.head = nn.Linear(WIDTH, 3)
        self.route: Sequence[int] = range(len(inner))
        self.reentrant: bool | None = None
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("scale"))
        self.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        if self.reentrant:
            hidden.requires_grad_()
        for number in self.route:
            block = self.blocks[number]
            hidden = block(hidden) if self.reentrant is None else self._checkpointed(block, hidden)
        out: Tensor = self.head(hidden)
        return out

    def _checkpointed(self, block: nn.Module, hidden: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return out


def saved(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> Mapping[str, CheckpointTensor]:
    """Write a model's parameters to one file, and return where they are."""
    tensors = {name: p.detach().to(dtype or p.dtype).clone() for name, p in model.named_parameters()}
    save_file(tensors, path)
    return read_checkpoint(path)


def on_disk(
    model: nn.Module, path: Path, engine: StorageEngine, dtype: torch.dtype | None = None
) -> dict[str, Source]:
    """Write a model to one file, and return the sources of what is frozen."""
    return sources_of(saved(model, path, dtype), model, engine)


class Trainer:
    """Trains a stack, step by step; every result is kept."""

    def __init__(self, model: Stack) -> None:
        self.model = model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=0.05)
        self.results: list[Tensor] = []

    def inputs(self) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.results))
        return torch.randn(5, 4, generator=generator).to(self.model.embed.weight.dtype)

    def step(self, route: Sequence[int] | None = None) -> None:
        self.optimizer.zero_grad()
        self.model.route = range(len(self.model.blocks)) if route is None else route
        loss = self.model(self.inputs()).square().mean()
        if loss.requires_grad:
            loss.backward()
            self.optimizer.step()
        self.results += [loss.detach().clone(), *(p.detach().clone() for p in self.trained)]

    def evaluate(self) -> None:
        self.model.eval()
        self.model.route = range(len(self.model.blocks))
        self.results.append(self.model(self.inputs()).detach().clone())
        self.model.train()


def identical(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def steps(trainer: Trainer) -> None:
    for _ in range(4):
        trainer.step()


def trained(drive: Callable[[Trainer], None], **model: Any) -> Trainer:
    """Return a trainer of a model in memory after what ``drive`` does with it."""
    trainer = Trainer(Stack(**model))
    drive(trainer)
    return trainer
