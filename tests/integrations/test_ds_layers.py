# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 entered per layer gives the losses of a model that is whole in memory, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ds_models import masters, relative
from ds_nvme import batches, lora_on, shape_for_disk, swapper_of, train_step
from ds_runner import Runner
from ds_worker import Run
from torch import Tensor, nn

STEPS, LAYERS = 6, 4


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
) -> dict[str, Any]:
    whole = lora_on(shape_for_disk(num_hidden_layers=LAYERS, **(model or {})), **(adapter or {}))
    unusual(whole, kind)
    if reentrant is not None:
        whole.enable_input_require_grads()
        whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    engine = run.initialize(whole, configured(run, tier, budget))
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
    if tier == "nvme":
        usage = swapper_of(engine)._engine.arena.usage()
        result["memory"] = (usage.peak_live, usage.peak_held)
        result["alive"] = usage.live
    return result


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


@pytest.mark.parametrize("case", CASES)
def test_every_tier_and_budget_gives_the_resident_losses(runner: Runner, case: str) -> None:
    resident = runner.one(train, tier="resident", **CASES[case]).result
    tiers: list[tuple[str, int | None]] = [("nvme", 0), ("nvme", 6 << 20)]
    if case in ("plain", "reentrant checkpointing"):
        tiers += [("cpu", None), ("nvme", None)]
    for tier, budget in tiers:
        streamed = runner.one(train, tier=tier, budget=budget, **CASES[case]).result
        assert streamed["losses"] == resident["losses"], (tier, budget)
        assert all(torch.equal(streamed["masters"][n], m) for n, m in resident["masters"].items())
        if tier == "nvme" and budget is not None:
            assert streamed["memory"][1] <= 1.05 * streamed["memory"][0]
            if CASES[case].get("kind") != "view":
                assert streamed["memory"][0] <= budget + 2 * max(streamed["sizes"]), (tier, budget)


def test_layers_skipped_at_random_are_streamed_as_from_memory(runner: Runner) -> None:
    in_memory = runner.one(train, tier="cpu", kind="skipped").result
    for budget in (0, 6 << 20):
        streamed = runner.one(train, tier="nvme", kind="skipped", budget=budget).result
        assert streamed["losses"] == in_memory["losses"]
        assert streamed["records"] > 1


def test_a_layer_is_entered_at_most_twice_a_pass(runner: Runner) -> None:
    result = runner.one(train, tier="nvme", budget=0).result
    assert 2.0 < result["entries"] <= 4.0  # a step has a forward and a backward pass
    assert result["records"] == 1


def test_losses_are_those_of_stock_zero_3_up_to_the_order_of_sums(runner: Runner) -> None:
    ours = runner.one(train, tier="cpu").result
    stock = runner.one(stock_losses, "bare", tmp=None).result
    # Six steps after gradients that differ in their last bit; ten times less than the losses move.
    assert relative(ours["losses"], stock) <= 1e-3


def stock_losses(run: Run) -> list[float]:
    """Train with DeepSpeed as it is."""
    from ds_worker import no_shared_memory_collectives

    no_shared_memory_collectives()
    whole = lora_on(shape_for_disk(num_hidden_layers=LAYERS))
    engine = run.initialize(whole, configured(run, "cpu", None))
    assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
    assert not hasattr(engine.optimizer.parameter_offload, "peftds_layers")
    return [train_step(engine, batch) for batch in batches(STEPS)]


def refused(run: Run, change: dict[str, Any]) -> dict[str, Any]:
    """Start an engine for which DeepSpeed's own hooks are needed."""
    import deepspeed

    model = lora_on(shape_for_disk(hidden_size=64, intermediate_size=64))
    config = run.config(**change.get("config", {}))
    if change.get("leaf"):
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.base_model.model.model.layers[0].mlp)])
    engine = run.initialize(model, config)
    return {
        "ours": hasattr(engine.optimizer.parameter_offload, "peftds_layers"),
        "loss": train_step(engine, batches(1)[0]),
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": {"zero": {"offload_param": {"device": "none"}}}}, "parameters are not offloaded"),
        ({"leaf": True}, "leaf modules are set"),
    ],
)
def test_where_layers_are_not_for_us_the_log_says_why(
    runner: Runner, change: dict[str, Any], reason: str
) -> None:
    outcome = runner.one(refused, change=change)
    assert outcome.result["ours"] is False
    assert outcome.said(f"module by module: {reason}") == 1


def hooks_taken_off_and_on(run: Run) -> list[float]:
    """Do what TRL does round generation: remove the hooks, and register them again."""
    engine = run.initialize(lora_on(shape_for_disk()), configured(run, "nvme", 0))
    losses = [train_step(engine, batch) for batch in batches(2)]
    offload = engine.optimizer.parameter_offload
    for hook in offload.forward_hooks + offload.backward_hooks:
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    offload._register_deepspeed_module(offload.module)
    return losses + [train_step(engine, batch) for batch in batches(4)[2:]]


def straight(run: Run) -> list[float]:
    engine = run.initialize(lora_on(shape_for_disk()), configured(run, "nvme", 0))
    return [train_step(engine, batch) for batch in batches(4)]


def test_hooks_can_be_taken_off_and_put_on_again(runner: Runner) -> None:
    assert runner.one(hooks_taken_off_and_on).result == runner.one(straight).result


class Outer(nn.Module):
    """A module with a frozen matrix of its own, used before and after the layer inside."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        generator = torch.Generator().manual_seed(5)
        self.mix = nn.Parameter(
            torch.randn(width, width, generator=generator).mul_(0.01).add_(torch.eye(width))
        )
        self.mix.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        mix = self.mix.to(inputs.dtype)
        return self.inner(inputs @ mix) @ mix


def nested_and_inference(run: Run, tier: str) -> list[float]:
    """A layer inside a module with weights of its own, and evaluation in inference mode between steps."""
    whole = lora_on(shape_for_disk(hidden_size=1024, intermediate_size=1024))
    model = whole.base_model.model.model
    model.norm = Outer(model.norm, 1024)
    engine = run.initialize(whole, configured(run, tier, None))
    if tier == "resident":
        for hook in engine.optimizer.parameter_offload.forward_hooks:
            hook.remove()
    losses = []
    for batch in batches(4):
        if tier == "resident":
            parameters = list(engine.module.parameters())
            parameters[0].all_gather(parameters)
        losses.append(train_step(engine, batch))
        if tier == "resident":
            parameters[0].all_gather(parameters)
        engine.eval()
        with torch.inference_mode():
            losses.append(float(engine(input_ids=batch, labels=batch).loss))
        engine.train()
    return losses


def test_layers_inside_of_others_and_inference_mode(runner: Runner) -> None:
    resident = runner.one(nested_and_inference, tier="resident").result
    assert runner.one(nested_and_inference, tier="cpu").result == resident
    assert runner.one(nested_and_inference, tier="nvme").result == resident


def order_changes_under_trainable_layers(run: Run, tier: str) -> dict[str, Any]:
    """Train whole layers, which DeepSpeed takes off the disk at the start, and change the order."""
    whole = lora_on(shape_for_disk(num_hidden_layers=LAYERS), modules_to_save=["up_proj"])
    engine = run.initialize(whole, configured(run, tier, 0))
    losses = []
    for number, batch in enumerate(batches(STEPS)):
        whole.base_model.model.config.num_hidden_layers = LAYERS - number % 3
        losses.append(train_step(engine, batch))
        if tier == "nvme":
            usage = swapper_of(engine)._engine.arena.usage()
            pipeline = engine.optimizer.parameter_offload.param_coordinator._fetch.pipeline
            assert usage.peak_live <= 2 * max(pipeline.sizes), (number, usage.peak_live)
    return {"losses": losses, "masters": masters(engine)}


def test_what_is_read_ahead_in_vain_is_dropped_and_nothing_else(runner: Runner) -> None:
    in_memory = runner.one(order_changes_under_trainable_layers, tier="cpu").result
    streamed = runner.one(order_changes_under_trainable_layers, tier="nvme").result
    assert streamed["losses"] == in_memory["losses"]
    assert all(torch.equal(streamed["masters"][n], m) for n, m in in_memory["masters"].items())
