# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's functions that read and set gradients, weights and moments work as with stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_models import (
    Mlp,
    adamw_by_torch,
    furthest,
    gradients,
    llama,
    masters,
    moments,
    rows,
    tokens,
    trainable,
)
from ds_runner import Runner
from ds_worker import Run
from torch import Tensor

DTYPES = ["bf16", "fp32"]


def _engine(run: Run, dtype: str, **changes: Any) -> Any:
    return run.initialize(Mlp(), run.config(dtype, **changes))


def _backward(engine: Any, x: Tensor, **options: Any) -> None:
    engine.backward(engine(x.to(engine.get_data_types()[0]), **options))


def read_all(run: Run, dtype: str, accumulation: int) -> dict[str, Any]:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state

    engine = _engine(run, dtype, gradient_accumulation_steps=accumulation)
    record: dict[str, Any] = {}
    for number, x in enumerate(rows(3 * accumulation)):
        _backward(engine, x)
        if engine.is_gradient_accumulation_boundary():
            record[f"gradients {number}"] = gradients(engine)
            record[f"local {number}"] = {n: safe_get_local_grad(p).clone() for n, p in trainable(engine)}
            partitions = engine.optimizer.get_fp32_grad_partitions().items()
            flat = {f"{i} {j}": t.clone() for i, group in partitions for j, t in group.items()}
            record[f"partitions {number}"] = flat
        engine.step()
        record[f"masters {number}"] = masters(engine)
    record["moments"] = moments(engine)
    record["local masters"] = {n: safe_get_local_fp32_param(p) for n, p in trainable(engine)}
    record["local moments"] = {n: safe_get_local_optimizer_state(p, "exp_avg") for n, p in trainable(engine)}
    return record


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_is_what_stock_has(runner: Runner, dtype: str, accumulation: int) -> None:
    ours, stock = (o.result for o in runner.pair(read_all, dtype=dtype, accumulation=accumulation))
    assert ours.keys() == stock.keys()
    for name in ours:
        # Gradients, up to 0.3, are the same until a weight rounds the other way in bf16.
        last_bits = 0.0 if name.split()[-1] == str(accumulation - 1) and "masters" not in name else 5e-7
        assert furthest(ours[name], stock[name]) <= last_bits, name


def read_after_step(run: Run, dtype: str, loss_scale: float) -> list[dict[str, Tensor]]:
    section = {"fp16": {"enabled": True, "loss_scale": loss_scale}} if dtype == "fp16" else {}
    engine = _engine(run, dtype, gradient_accumulation_steps=2, **section)
    record = []
    for number, x in enumerate(rows(4)):
        _backward(engine, x)
        engine.step()
        if number % 2:
            record.append(gradients(engine))
    return record


@pytest.mark.parametrize(("dtype", "loss_scale"), [("bf16", 1), ("fp32", 1), ("fp16", 128)])
def test_gradients_can_be_read_after_the_step(runner: Runner, dtype: str, loss_scale: float) -> None:
    ours, stock = (o.result for o in runner.pair(read_after_step, dtype=dtype, loss_scale=loss_scale))
    for mine, its in zip(ours, stock, strict=True):
        assert furthest(mine, its) <= 1e-6
        assert max(float(t.abs().max()) for t in its.values()) > 1e-3


def adalora(run: Run) -> dict[str, Any]:
    import peft
    from transformers.integrations import HfDeepSpeedConfig

    config = run.config("bf16")
    known = HfDeepSpeedConfig(config)  # while it lives, PEFT asks DeepSpeed for gradients
    torch.manual_seed(1)
    options = {"init_r": 6, "target_r": 3, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 6}
    adalora = peft.AdaLoraConfig(target_modules=["q_proj", "v_proj"], **options)
    engine = run.initialize(peft.get_peft_model(llama(), adalora), config)
    losses = []
    for number, batch in enumerate(tokens(5)):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        engine.module.base_model.update_and_allocate(number)
        losses.append(float(loss))
    importance = engine.module.base_model.rankallocator.ipt
    return {"losses": losses, "importance": importance, "alive": known is not None}


def test_adalora_ranks_by_gradients_after_the_step(runner: Runner) -> None:
    ours, stock = (o.result for o in runner.pair(adalora))
    assert max(float(t.max()) for t in stock["importance"].values()) > 0.0
    assert furthest(ours["importance"], stock["importance"]) <= 1e-6
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)


def _set_full(engine: Any) -> None:
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    for _, parameter in trainable(engine):
        safe_set_full_grad(parameter, safe_get_full_grad(parameter).float() * 0.5 + 0.01)


def _set_local(engine: Any) -> None:
    from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

    for _, parameter in trainable(engine):
        safe_set_local_grad(parameter, safe_get_local_grad(parameter).float() * 0.5 + 0.01)


def _set_vectorized(engine: Any) -> None:
    from deepspeed.utils import safe_update_full_grad_vectorized

    parameters = [parameter for _, parameter in trainable(engine)]
    safe_update_full_grad_vectorized(parameters, lambda gradient, _: gradient * 0.5 + 0.01)


def _set_partitions(engine: Any) -> None:
    for group in engine.optimizer.get_fp32_grad_partitions().values():
        for partition in group.values():
            partition.mul_(0.5).add_(0.01)


SETTERS: dict[str, Callable[[Any], None]] = {
    "full": _set_full,
    "local": _set_local,
    "vectorized": _set_vectorized,
    "partitions": _set_partitions,
}


def set_in_each_step(run: Run, dtype: str, setter: str) -> dict[str, Any]:
    engine = _engine(run, dtype, gradient_accumulation_steps=2, gradient_clipping=0.0)
    read = []
    for number, x in enumerate(rows(6)):
        _backward(engine, x)
        if number % 2:
            SETTERS[setter](engine)
            read.append(gradients(engine))
        engine.step()
    return {"read": read, "masters": masters(engine), "moments": moments(engine)}


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_set_takes_effect_as_in_stock(runner: Runner, dtype: str, setter: str) -> None:
    ours, stock = (o.result for o in runner.pair(set_in_each_step, dtype=dtype, setter=setter))
    assert furthest(ours["read"][0], stock["read"][0]) == 0.0
    for name in ("masters", "moments"):
        assert furthest(ours[name], stock[name]) <= 5e-7, name


def _half_and_more(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5).add_(0.01)


def set_and_clip(run: Run, setter: str) -> float:
    """Stock clips by the norm before the change."""
    engine = _engine(run, "fp32", gradient_clipping=0.05)
    for x in rows(3):
        _backward(engine, x)
        SETTERS[setter](engine)
        engine.step()

    model = Mlp()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_half_and_more)
    windows = [[lambda model, x=x: model(x)] for x in rows(3)]
    return furthest(masters(engine), adamw_by_torch(model, windows, clip=0.05))


@pytest.mark.parametrize("setter", SETTERS)
def test_clipping_is_by_what_was_set(runner: Runner, setter: str) -> None:
    assert runner.one(set_and_clip, setter=setter).result <= 5e-7


def set_without_backward(run: Run) -> dict[str, Any]:
    """A gradient that is set where there was none, one replaced by a later backward, and Inf."""
    from deepspeed.utils import safe_set_full_grad

    engine = _engine(run, "bf16", gradient_clipping=0.0, gradient_accumulation_steps=2)
    named = dict(trainable(engine))
    record: dict[str, Any] = {}
    _backward(engine, rows(1)[0], skip=True)
    engine.step()
    safe_set_full_grad(named["always.bias"], torch.full((16,), 100.0))
    _backward(engine, rows(1)[0], skip=True)
    record["after"] = gradients(engine)
    safe_set_full_grad(named["optional.weight"], torch.ones(16, 16))
    engine.step()
    record["moments"] = moments(engine)

    before = masters(engine)
    for _ in range(2):
        _backward(engine, rows(1)[0])
        safe_set_full_grad(named["optional.weight"], torch.full((16, 16), torch.inf))
        engine.step()
    record["skipped"] = (engine.skipped_steps, furthest(masters(engine), before))
    return record


def test_gradient_set_where_there_was_none(runner: Runner) -> None:
    result = runner.one(set_without_backward).result
    assert float(result["after"]["always.bias"].abs().max()) < 10.0
    assert torch.allclose(result["moments"]["optional.weight.exp_avg"], torch.full((16, 16), 0.1))
    assert float(result["moments"]["optional.bias.exp_avg"].abs().max()) == 0.0
    assert result["skipped"] == (1, 0.0)


def set_states(run: Run) -> dict[str, Any]:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    engine = _engine(run, "bf16", gradient_clipping=0.0)
    _backward(engine, rows(1)[0])
    engine.step()
    for _, parameter in trainable(engine):
        shape = parameter.ds_shape
        safe_set_full_fp32_param(parameter, torch.full(shape, 0.25))
        safe_set_full_optimizer_state(parameter, torch.full(shape, 0.5), "exp_avg")
        safe_set_full_optimizer_state(parameter, torch.full(shape, 4.0), "exp_avg_sq")
    _backward(engine, rows(1)[0])
    engine.step()
    return {"masters": masters(engine), "moments": moments(engine)}


def test_weights_and_moments_that_are_set_are_used(runner: Runner) -> None:
    ours, stock = (o.result for o in runner.pair(set_states))
    for name in ("masters", "moments"):
        assert furthest(ours[name], stock[name]) <= 5e-7, name


def accumulate_elsewhere(run: Run, dtype: str, elsewhere: bool, looks: bool) -> dict[str, Any]:
    """Train as with gradients on an accelerator: they gather there, and the host gets them once a window.

    The second micro step of each window leaves a layer out, and in one window so does the last.
    """
    from peftds_ext.integrations.deepspeed.stage3_gradients import LowPrecisionGradients

    if elsewhere:
        LowPrecisionGradients._is_on_host = staticmethod(lambda partition: False)
    engine = _engine(run, dtype, gradient_accumulation_steps=3)
    record: dict[str, Any] = {"there": []}
    for number, x in enumerate(rows(12)):
        skip = number % 3 == 1 or number == 8
        engine.backward(engine(x.to(engine.get_data_types()[0]), skip=skip))
        record["there"].append(len(engine.optimizer._peftds_totals) > 0)
        if looks and number % 2:
            record[f"gradients {number}"] = gradients(engine)
        engine.step()
    return {**record, "masters": masters(engine), "moments": moments(engine)}


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_gather_on_the_device_are_handed_over_once(
    runner: Runner, dtype: str, looks: bool
) -> None:
    options = {"dtype": dtype, "looks": looks}
    device = runner.one(accumulate_elsewhere, elsewhere=True, **options).result
    host = runner.one(accumulate_elsewhere, elsewhere=False, **options).result
    left_out = [True, True, True]  # of a layer that the last micro step leaves out the step hands over
    assert device.pop("there") == [*[True, True, False] * 2, *left_out, True, True, False]
    assert host.pop("there") == [False] * 12
    for name, expected in host.items():
        assert furthest(device[name], expected) == 0.0, name
