# SPDX-License-Identifier: Apache-2.0
"""A run that trains layers on some tier, with what layers do now and then, for the tests of several tiers."""

from __future__ import annotations

import random
from typing import Any

import torch
from ds_models import masters
from ds_nvme import batches, lora_on, shape_for_disk, swapper_of, train_step
from ds_worker import Run
from lazy_device import LazyDevice
from torch import Tensor, nn

import peftds_ext

STEPS, LAYERS = 6, 4


PACES: dict[str, dict[str, Any]] = {"lazy": {}, "eager": {"eager": True}, "behind": {"lag": 60}}
"""When a stand-in for a GPU makes copies, and when that is known."""


def on_a_device(pace: str) -> LazyDevice:
    """Let layers be copied to a stand-in for a GPU, from page-locked memory."""
    from peftds_ext import _native
    from peftds_ext.integrations.deepspeed import accelerator

    device = LazyDevice(**PACES[pace])
    accelerator.layer_device = lambda: device
    accelerator.page_lock = _native.core().mlock_page_lock
    return device


def configured(run: Run, tier: str, budget: int | None, **zero: Any) -> dict[str, Any]:
    """Return a configuration for a tier; "resident" is the host's memory, and no hooks: see :func:`train`."""
    place = {"device": "cpu" if tier == "resident" else tier} | (
        {"nvme_path": str(run.tmp / "disk")} if tier == "nvme" else {}
    )
    config = run.config(zero={"offload_param": place, **zero})
    if run.ours and budget is not None:
        config["peftds_ext"]["params"] = {"host_bytes": budget}
    return config


class SavesView(torch.autograd.Function):
    """A linear map that keeps a transposed view of its weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        view = weight.t()
        ctx.view = view
        return inputs @ view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.view.t(), None


class Unusual(nn.Module):
    """Wraps a model's layers so that they do what real ones do now and then."""

    def __init__(self, kind: str, layer: nn.Module) -> None:
        super().__init__()
        self.inner, self.kind = layer, kind
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        output = self.inner(*args, **kwargs)
        if self.kind == "twice":
            output = self.inner(output, *args[1:], **kwargs)
        if self.kind == "fails" and self.calls == 4:
            raise RuntimeError("on purpose")
        return output


def unusual(model: Any, kind: str) -> None:
    layers = model.base_model.model.model.layers
    if kind == "view":
        for layer in layers:
            layer.mlp.down_proj.forward = _through_a_view.__get__(layer.mlp.down_proj)
    elif kind in ("twice", "fails"):
        layers[2] = Unusual(kind, layers[2])


def _through_a_view(self: Any, inputs: Tensor) -> Tensor:
    return SavesView.apply(inputs, self.weight)


def train(
    run: Run,
    tier: str,
    budget: int | None = None,
    kind: str = "",
    reentrant: bool | None = None,
    model: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    device: str = "",
    device_budget: int | None = None,
    **zero: Any,
) -> dict[str, Any]:
    """Train, and return losses, masters, and what was held; ``device`` is a pace, or none."""
    stand_in = on_a_device(device) if device else None
    whole = lora_on(shape_for_disk(num_hidden_layers=LAYERS, **(model or {})), **(adapter or {}))
    unusual(whole, kind)
    if reentrant is not None:
        whole.enable_input_require_grads()
        whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    config = configured(run, tier, budget, **zero)
    if device_budget is not None:
        config["peftds_ext"].setdefault("params", {})["device_bytes"] = device_budget
    engine = run.initialize(whole, config)
    losses = []
    chance = random.Random(0)
    offload = engine.optimizer.parameter_offload
    if tier == "resident":
        for hook in offload.forward_hooks:
            hook.remove()
    for batch in batches(STEPS):
        if tier == "resident":  # everything is there before anything runs
            parameters = list(engine.module.parameters())
            parameters[0].all_gather(parameters)
        if kind == "skipped":
            whole.base_model.model.config.num_hidden_layers = chance.randint(1, LAYERS)
        try:
            losses.append(train_step(engine, batch))
        except RuntimeError as error:
            if "on purpose" not in str(error):
                raise
            losses.append(-1.0)
    result = {"losses": losses, "masters": masters(engine)}
    if tier != "resident":
        coordinator = engine.optimizer.parameter_offload.param_coordinator
        result["entries"] = coordinator.entries / (
            STEPS * len(engine.optimizer.parameter_offload.peftds_layers)
        )
        pipeline = coordinator._fetch.pipeline
        result["sizes"] = pipeline.sizes if pipeline else ()
        result["records"] = pipeline.records if pipeline else 0
    if stand_in is not None:
        result |= on_the_device(engine, stand_in)
    if tier == "nvme":
        usage = swapper_of(engine)._engine.arena.usage()
        result["memory"] = (usage.peak_live, usage.peak_held)
        result["alive"] = usage.live
    return result


def on_the_device(engine: Any, device: LazyDevice) -> dict[str, Any]:
    """Return what the stand-in for a GPU has seen."""
    fetch = engine.optimizer.parameter_offload.param_coordinator._fetch
    counts, arena = fetch.uploads.counts, fetch._host.arena
    return {
        "device peak": device.peak,
        "device sizes": fetch.uploads.sizes,
        "counts": vars(counts),
        "host": (arena.usage().live, arena.usage().held, arena.usage().locked),
        "stats": peftds_ext.stats(engine).model_dump(),
    }


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"reentrant": False},
    "reentrant checkpointing": {"reentrant": True},
    "tied embeddings": {"model": {"tie_word_embeddings": True}},
    "modules_to_save": {"adapter": {"modules_to_save": ["lm_head"]}},
    "all modules adapted": {"adapter": {"target_modules": "all-linear"}},
    "a layer used twice": {"kind": "twice"},
    "an exception in mid-forward": {"kind": "fails"},
    "an operator that saves a view": {"kind": "view"},
}
