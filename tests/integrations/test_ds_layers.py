# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 entered per layer gives the losses of a model that is whole in memory, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_layers import CASES, LAYERS, STEPS, configured, train
from ds_models import masters, relative
from ds_nvme import batches, lora_on, shape_for_disk, swapper_of, train_step
from ds_runner import Runner
from ds_worker import Run
from torch import Tensor, nn


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
