# SPDX-License-Identifier: Apache-2.0
"""The model that gpu_streaming.py streams: like a Llama, in plain torch, frozen but for LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from peftds_ext.store.checkpoint import CheckpointTensor, read_checkpoint

LONGEST = 2048
"""Tokens of a sequence; more of them are several sequences."""


@dataclass(frozen=True)
class Shape:
    """What a model is made of."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    heads: int
    rank: int = 8

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block's frozen matrices."""
        return 2 * self.hidden * (4 * self.hidden + 3 * self.inner)

    @property
    def base_bytes(self) -> int:
        """Bytes of what is frozen, norms aside."""
        return self.layers * self.layer_bytes + 4 * self.vocabulary * self.hidden


class LoraLinear(nn.Module):
    """A frozen matrix and an adapter of it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.adapter = nn.Sequential(
            nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.base(inputs) + self.adapter(inputs)
        return out


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm, self.mlp_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.query, self.key, self.value, self.output = (
            LoraLinear(shape.hidden, shape.hidden, shape.rank) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        out: Tensor = hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


class Model(nn.Module):
    """Blocks in the order of ``route``, checkpointed unless ``reentrant`` is None."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.route: Sequence[int] = range(shape.layers)
        self.reentrant: bool | None = None
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        hidden = self.embed(tokens[:, :-1])
        if self.reentrant:
            hidden.requires_grad_()
        for number in self.route:
            block = self.blocks[number]
            if self.reentrant is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        logits = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(shape: Shape, device: torch.device) -> Model:
    """Return a bf16 model with random weights, on one device the same each time."""
    with torch.device(device):
        model = Model(shape).to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what is not trained, by name."""
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def write(model: nn.Module, path: Path) -> Mapping[str, CheckpointTensor]:
    """Write what is frozen to one file, and return where it is."""
    save_file({name: parameter.detach().cpu() for name, parameter in frozen(model).items()}, path)
    return read_checkpoint(path)


class Trainer:
    """Trains a model step by step; losses, and adapters after each step, are kept."""

    def __init__(self, model: Model, shape: Shape, tokens: int, *, keep: bool = True) -> None:
        self.model, self._layers, self._keep = model, shape.layers, keep
        device = model.embed.weight.device
        generator = torch.Generator().manual_seed(1)
        size = (4, -(-tokens // LONGEST), min(tokens, LONGEST) + 1)
        self.batches = torch.randint(0, shape.vocabulary, size, generator=generator).to(device)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self.trained, lr=3e-3)
        self._steps = 0
        self.results: list[Tensor] = []

    def backward(self, route: Sequence[int] | None = None) -> Tensor:
        """Do all of a step but the optimizer's part; returns the loss."""
        self._optimizer.zero_grad()
        self.model.route = range(self._layers) if route is None else route
        loss: Tensor = self.model(self.batches[self._steps % len(self.batches)])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, route: Sequence[int] | None = None) -> None:
        """Train on the next batch; ``route`` are the numbers of the blocks, as they are used."""
        loss = self.backward(route)
        self._optimizer.step()
        self._steps += 1
        if self._keep:
            self.results += [loss, *(parameter.detach().clone() for parameter in self.trained)]

    def steps(self, count: int) -> None:
        """Train on some batches."""
        for _ in range(count):
            self.step()

    def evaluate(self) -> Tensor:
        """Return the loss of the first batch; nothing is trained."""
        self.model.eval()
        self.model.route = range(self._layers)
        with torch.no_grad():
            loss: Tensor = self.model(self.batches[0])
        self.model.train()
        self.results.append(loss)
        return loss


def identical(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Tell whether results are the same to the bit; NaNs are like nothing."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
