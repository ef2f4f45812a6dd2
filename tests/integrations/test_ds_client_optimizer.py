# SPDX-License-Identifier: Apache-2.0
"""Every way to give DeepSpeed an optimizer ends with our kernel, or with what the client insists on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ds_models import Mlp, adamw_by_torch, furthest, masters, rows
from ds_runner import Runner, compiler_missing
from ds_worker import Run

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())


def _groups(model: Mlp) -> list[dict[str, Any]]:
    return [
        {"params": list(model.optional.parameters()), "lr": 4e-3, "weight_decay": 0.0},
        {"params": list(model.always.parameters()), "betas": (0.8, 0.9), "eps": 1e-6},
    ]


def _optimizer(name: str, model: Mlp) -> Any:
    if name == "FusedAdamW":
        from peftds_ext import FusedAdamW

        return FusedAdamW(_groups(model), lr=1e-3, weight_decay=0.1)
    if name == "DeepSpeedCPUAdam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(_groups(model), lr=1e-3, weight_decay=0.1)
    return getattr(torch.optim, name)(_groups(model), lr=1e-3, weight_decay=0.1)


def train_client(run: Run, name: str, stage: int) -> dict[str, Any]:
    """Train with the client's optimizer and, for the reference, with the same one in plain torch."""
    model = Mlp()
    client = _optimizer(name, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 0.5**step)
    config = run.config("fp32", stage, optimizer=None, gradient_clipping=0.0)
    engine = run.initialize(model, config, optimizer=client)
    rates = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in rows(3):
            engine.backward(engine(x))
            engine.step()
            rates.append(engine.get_lr())
            scheduler.step()
    inner = engine.optimizer.optimizer

    reference = Mlp()
    plain = _optimizer("AdamW" if "AdamW" in name or "CPU" in name else "Adam", reference)
    plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 0.5**step)
    for x in rows(3):
        plain.zero_grad()
        reference(x).backward()
        plain.step()
        plain_scheduler.step()
    return {
        "optimizer": type(inner).__name__,
        "kernel": type(inner.ds_opt_adam).__name__,
        "rates": rates,
        "warnings": [str(w.message) for w in caught if "scheduler" in str(w.message)],
        "apart": furthest(masters(engine), {n: p.detach() for n, p in reference.named_parameters()}),
    }


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "FusedAdamW", "DeepSpeedCPUAdam"])
def test_client_optimizer_keeps_its_groups(runner: Runner, name: str, stage: int) -> None:
    result = runner.one(train_client, name=name, stage=stage).result
    assert (result["optimizer"], result["kernel"]) == ("DeepSpeedCPUAdam", "KernelCpuAdam")
    assert result["rates"] == [[4e-3, 1e-3], [2e-3, 5e-4], [1e-3, 2.5e-4]]
    assert result["warnings"] == []
    assert result["apart"] <= 1e-6  # three steps of up to 4e-3


def scheduler_given_to_deepspeed(run: Run) -> dict[str, Any]:
    model = Mlp()
    client = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 0.5**step)
    config = run.config("fp32", optimizer=None)
    rates = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = run.initialize(model, config, optimizer=client, lr_scheduler=scheduler)
        for x in rows(3):
            engine.backward(engine(x))
            rates.append(engine.get_lr()[0])
            engine.step()
    return {"rates": rates, "warnings": [str(w.message) for w in caught if "scheduler" in str(w.message)]}


def test_scheduler_given_to_deepspeed_acts_without_a_warning(runner: Runner) -> None:
    result = runner.one(scheduler_given_to_deepspeed).result
    assert result["rates"] == [1e-3, 5e-4, 2.5e-4]
    assert result["warnings"] == []


def optimizer_factory(run: Run) -> dict[str, Any]:
    """A callable makes the optimizer from the parameters: the other kind of client optimizer."""
    config = run.config("fp32", optimizer=None, gradient_clipping=0.0)
    engine = run.initialize(
        model := Mlp(),
        config,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
        model_parameters=list(model.parameters()),
    )
    for x in rows(3):
        engine.backward(engine(x))
        engine.step()
    reference = adamw_by_torch(Mlp(), [[lambda model, x=x: model(x)] for x in rows(3)])
    inner = engine.optimizer.optimizer
    return {"optimizer": type(inner).__name__, "apart": furthest(masters(engine), reference)}


def test_factory_of_a_torch_optimizer(runner: Runner) -> None:
    result = runner.one(optimizer_factory).result
    assert result["optimizer"] == "DeepSpeedCPUAdam"
    assert result["apart"] <= 1e-6


def refused(run: Run, options: dict[str, Any], mixed: bool) -> str:
    from peftds_ext.errors import ConfigError

    model = Mlp()
    client = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    if mixed:
        other = {"params": [torch.nn.Parameter(torch.zeros(2))], "decoupled_weight_decay": False}
        client.add_param_group(other)
    try:
        run.initialize(model, run.config(optimizer=None), optimizer=client)
    except ConfigError as error:
        if torch.distributed.is_initialized():
            raise AssertionError("refused too late") from error
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "mixed", "named"),
    [
        ({"amsgrad": True}, False, "amsgrad"),
        ({"maximize": True}, False, "maximize"),
        ({}, True, "Adam and AdamW"),
    ],
)
def test_what_cpu_adam_cannot_do_is_refused(
    runner: Runner, options: dict[str, Any], mixed: bool, named: str
) -> None:
    message = runner.one(refused, options=options, mixed=mixed).result
    assert named in message
    assert "zero_force_ds_cpu_optimizer" in message


def client_insists(run: Run, amsgrad: bool) -> dict[str, Any]:
    model = Mlp()
    client = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=amsgrad)
    config = run.config("bf16", optimizer=None, zero_force_ds_cpu_optimizer=False)
    engine = run.initialize(model, config, optimizer=client)
    losses = []
    for x in rows(4):
        loss = engine(x.bfloat16())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return {"losses": losses, "masters": masters(engine), "same": engine.optimizer.optimizer is client}


@pytest.mark.parametrize("amsgrad", [False, True])
def test_client_may_insist_on_its_optimizer(runner: Runner, amsgrad: bool) -> None:
    ours, stock = runner.pair(client_insists, amsgrad=amsgrad)
    assert ours.result["same"]
    assert ours.result["losses"] == stock.result["losses"]
    assert furthest(ours.result["masters"], stock.result["masters"]) == 0.0
    assert ours.said("AdamW, not DeepSpeedCPUAdam") >= 1


def torch_adam_by_name(run: Run) -> dict[str, Any]:
    engine = run.initialize(Mlp(), run.config("bf16", adam_params={"torch_adam": True}))
    for x in rows(4):
        engine.backward(engine(x.bfloat16()))
        engine.step()
    return {"optimizer": type(engine.optimizer.optimizer).__name__, "masters": masters(engine)}


def test_torch_adam_by_name_stays(runner: Runner) -> None:
    ours, stock = (o.result for o in runner.pair(torch_adam_by_name))
    assert ours["optimizer"] == stock["optimizer"] == "AdamW"
    assert furthest(ours["masters"], stock["masters"]) == 0.0


def made_before_install(run: Run) -> dict[str, Any]:
    """The stock op is built already, and goes out of use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from ds_worker import no_shared_memory_collectives

    no_shared_memory_collectives()
    model = Mlp()
    client = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    before = type(client.ds_opt_adam).__name__
    import peftds_ext

    peftds_ext.install()
    config = run.config("fp32", optimizer=None) | {"peftds_ext": {"enabled": True}}
    engine = run.initialize(model, config, optimizer=client)
    engine.backward(engine(rows(1)[0]))
    engine.step()
    after = type(engine.optimizer.optimizer.ds_opt_adam).__name__
    return {"before": before, "after": after, "same": engine.optimizer.optimizer is client}


@needs_compiler
def test_cpu_adam_made_before_install(runner: Runner) -> None:
    result = runner.one(made_before_install, "bare").result
    assert result == {"before": "module", "after": "KernelCpuAdam", "same": True}
