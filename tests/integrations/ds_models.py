# SPDX-License-Identifier: Apache-2.0
"""Small models and loops that the scenarios share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128


def llama(hidden: int = 32, layers: int = 2, seed: int = 0, **changes: Any) -> Any:
    """Return a Llama with random weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        **changes,
    )
    return transformers.LlamaForCausalLM(config)


def lora(model: Any, seed: int = 1, **changes: Any) -> Any:
    """Return the model with LoRA adapters none of which starts at zero."""
    import peft

    torch.manual_seed(seed)
    options = {"r": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **changes}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def tokens(steps: int, batch: int = 2, length: int = 16, seed: int = 3) -> list[Tensor]:
    """Return the same random batches in every run."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (batch, length), generator=generator) for _ in range(steps)]


class Mlp(nn.Module):
    """Two layers and a switch that leaves the first one out."""

    def __init__(self, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.optional = nn.Linear(width, width)
        self.always = nn.Linear(width, width)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        """Return a scalar loss."""
        if not skip:
            x = x + self.optional(x).tanh()
        result: Tensor = (self.always(x) ** 2).mean()
        return result


def rows(steps: int, width: int = 16, seed: int = 5) -> list[Tensor]:
    """Return the same random inputs in every run."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, width, generator=generator) for _ in range(steps)]


def adamw_by_torch(
    model: nn.Module,
    windows: list[list[Callable[[nn.Module], Tensor]]],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    clip: float = 0.0,
) -> dict[str, Tensor]:
    """Train in plain torch; a parameter without a gradient counts as one whose gradient is zero.

    A window is the list of losses, as functions of the model, that one step accumulates (their mean).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    for window in windows:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for loss in window:
            (loss(model) / len(window)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def trainable(engine: Any) -> list[tuple[str, Any]]:
    """Return the parameters that DeepSpeed trains; it leaves out those without elements."""
    named = engine.module.named_parameters()
    return [(n, p) for n, p in named if p.requires_grad and getattr(p, "ds_numel", p.numel())]


def masters(engine: Any) -> dict[str, Tensor]:
    """Return the fp32 master weights of all trainable parameters."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {n: safe_get_full_fp32_param(p).clone() for n, p in trainable(engine)}


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return what DeepSpeed says are the fp32 gradients of all trainable parameters."""
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p).float().clone() for n, p in trainable(engine)}


def moments(engine: Any) -> dict[str, Tensor]:
    """Return the first and second Adam moments of all trainable parameters."""
    from deepspeed.utils import safe_get_full_optimizer_state

    return {
        f"{name}.{key}": safe_get_full_optimizer_state(parameter, key).clone()
        for name, parameter in trainable(engine)
        for key in ("exp_avg", "exp_avg_sq")
    }


def train_tokens(
    engine: Any, batches: list[Tensor], before_step: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Train a language model; return its losses, norms and masters after the first and the last step."""
    record: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "skipped": []}
    for number, batch in enumerate(batches):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        if before_step is not None:
            before_step(number)
        engine.step()
        record["losses"].append(float(loss))
        if engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            record["norms"].append(float(engine.get_global_grad_norm()))
            record["scales"].append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
            record["skipped"].append(engine.skipped_steps)
        if engine.global_steps - engine.skipped_steps == 1 and "first" not in record:
            record["first"] = masters(engine)
    record["last"] = masters(engine)
    record["lr"] = engine.get_lr()
    return record


def relative(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference between two series; NaN if only one of two values is finite."""
    if len(ours) != len(theirs) or not ours:
        raise AssertionError(f"{len(ours)} values against {len(theirs)}")
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
    return float(torch.tensor([0.0, *(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)]).max())


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between two sets of tensors of the same names, or NaN."""
    if ours.keys() != theirs.keys() or not ours:
        raise AssertionError(f"{sorted(ours)} against {sorted(theirs)}")
    apart = [(ours[n] - theirs[n]).detach().abs().max() for n in ours if ours[n].numel()]
    return float(torch.stack(apart).max())
