# SPDX-License-Identifier: Apache-2.0
"""FusedAdamW among torch's other parts: what torch steps itself, hooks, scalers, autograd."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adamw_pairs import params_of, set_gradients, train, two_groups
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from peftds_ext import FusedAdamW

# ---- what the kernel does not step ---------------------------------------------------------------


def strided_param() -> Parameter:
    return Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).t())


FALLBACKS: dict[str, tuple[Callable[[], Parameter], dict[str, Any]]] = {
    "bf16": (lambda: Parameter(torch.linspace(-1, 1, 24).bfloat16()), {}),
    "fp64": (lambda: Parameter(torch.linspace(-1, 1, 24).double()), {}),
    "complex": (lambda: Parameter(torch.linspace(-1, 1, 24).to(torch.complex64)), {}),
    "not contiguous": (strided_param, {}),
    "channels last": (
        lambda: Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).fill_(0.5)),
        {},
    ),
    "amsgrad": (lambda: Parameter(torch.linspace(-1, 1, 24)), {"amsgrad": True}),
}


@pytest.mark.parametrize("arguments", [{}, {"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("case", FALLBACKS)
def test_torch_steps_what_the_kernel_cannot(
    case: str, arguments: dict[str, Any], kernel_calls: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    make, settings = FALLBACKS[case]
    if case == "complex" and "fused" in arguments:
        pytest.skip("torch's fused AdamW has no complex numbers")

    def run(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        ordinary = Parameter(torch.linspace(0, 1, 10))
        optimizer = cls([{"params": [ordinary]}, {"params": [make()], **settings}], lr=0.01, **arguments)
        train(optimizer, range(20))
        return optimizer

    with caplog.at_level(logging.INFO, logger="peftds_ext"):
        ours = run(FusedAdamW)
    theirs = run(AdamW)
    ordinary, other = params_of(ours)
    assert [id(p) for p in kernel_calls] == 20 * [id(ordinary)]
    assert torch.equal(other, params_of(theirs)[1]), "torch's own step must give torch's own bits"
    assert len(caplog.records) == 1, "the reason is logged once, not at each step"
    torch.testing.assert_close(ordinary, params_of(theirs)[0])


def test_a_gradient_that_is_not_contiguous_is_left_to_torch(kernel_calls: list[Tensor]) -> None:
    params = []
    for cls in (FusedAdamW, AdamW):
        params.append(Parameter(torch.ones(4, 6)))
        params[-1].grad = torch.arange(24.0).view(6, 4).t()
        cls([params[-1]], lr=0.1).step()
    assert torch.equal(*params)
    assert not kernel_calls


def test_a_sparse_gradient_raises_what_torch_raises() -> None:
    messages = []
    for cls in (FusedAdamW, AdamW):
        param = Parameter(torch.ones(4))
        param.grad = torch.eye(4)[0].to_sparse()
        with pytest.raises(RuntimeError) as caught:
            cls([param]).step()
        messages.append(str(caught.value))
        assert torch.equal(param, torch.ones(4))
    assert messages[0] == messages[1]


def test_distributed_tensors_are_left_to_torch(run_python: Callable[..., str]) -> None:
    # In a process of its own, because it makes a process group.
    output = run_python(
        """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from peftds_ext import FusedAdamW

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, results = init_device_mesh("cpu", (1,)), []
for cls in (torch.optim.AdamW, FusedAdamW):
    param = torch.nn.Parameter(distribute_tensor(torch.linspace(-1, 1, 8), mesh, [Shard(0)]))
    optimizer = cls([param], lr=0.1)
    for _ in range(2):
        param.grad = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        optimizer.step()
    results.append(param.to_local())
print(torch.equal(*results))
dist.destroy_process_group()
"""
    )
    assert output.strip() == "True"


def test_a_differentiable_step_carries_gradients() -> None:
    gradients = []
    for cls in (FusedAdamW, AdamW):
        start = torch.linspace(1, 2, 8, requires_grad=True)
        param = start.clone()
        param.grad = torch.linspace(-1, 1, 8) * start
        cls([param], lr=0.1, differentiable=True).step()
        param.square().sum().backward()
        gradients.append(start.grad)
    torch.testing.assert_close(*gradients)


def test_parameters_without_gradient_or_elements() -> None:
    without, empty, normal = Parameter(torch.ones(5)), Parameter(torch.ones(0, 3)), Parameter(torch.ones(5))
    optimizer = FusedAdamW([without, empty, normal])
    empty.grad, normal.grad = torch.ones(0, 3), torch.ones(5)
    optimizer.step()
    assert torch.equal(without, torch.ones(5))
    assert without not in optimizer.state
    assert optimizer.state[empty]["step"].item() == 1
    assert not torch.equal(normal, torch.ones(5))


# ---- manners ---------------------------------------------------------------------------------------


@pytest.fixture
def global_hooks() -> Iterator[list[str]]:
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("mixed", [False, True], ids=["kernel only", "with torch's step"])
def test_hooks_run_once_per_step(mixed: bool, global_hooks: list[str]) -> None:
    AdamW([Parameter(torch.ones(1))])  # torch wraps a class's step when it is first instantiated
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(4).bfloat16() if mixed else torch.ones(4))]
    optimizer = FusedAdamW(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, range(3))
    assert seen == ["before", "after"] * 3
    assert global_hooks == ["before", "after"] * 3


@pytest.mark.parametrize("fused", [None, True])
def test_a_grad_scaler_unscales_and_skips_overflows(fused: bool | None) -> None:
    params = [Parameter(torch.linspace(-1, 1, 20)) for _ in range(2)]
    scaled, plain = FusedAdamW([params[0]], lr=0.1, fused=fused), AdamW([params[1]], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weights = torch.linspace(-3, 3, 20)
    for _ in range(5):
        for optimizer in (scaled, plain):
            optimizer.zero_grad()
        scaler.scale((params[0] * weights).sum()).backward()
        (params[1] * weights).sum().backward()
        scaler.step(scaled)
        scaler.update()
        plain.step()
        torch.testing.assert_close(*params)
        torch.testing.assert_close(params[0].grad, params[1].grad)

    before = params[0].detach().clone()
    params[0].grad = torch.full((20,), float("inf"))
    scaler.scale(torch.ones(()))  # a scaler must have scaled something
    scaler.step(scaled)
    scaler.update()
    assert torch.equal(params[0], before)
    assert scaled.state[params[0]]["step"].item() == 5
    assert scaler.get_scale() == 512.0


def test_torchs_refusals_are_kept() -> None:
    params = [Parameter(torch.ones(3))]
    for wrong in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="Invalid"):
            FusedAdamW(params, **wrong)
    with pytest.raises(RuntimeError, match="fused"):
        FusedAdamW(params, fused=True, foreach=True)


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    weight, inputs = Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
    optimizer = FusedAdamW([weight], lr=0.1)
    loss = (weight * inputs).sum()
    weight.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_gradient_is_only_read() -> None:
    optimizer = FusedAdamW(two_groups(), maximize=True)
    set_gradients(optimizer, 0)
    before = [param.grad.clone() for param in params_of(optimizer) if param.grad is not None]
    optimizer.step()
    for param, grad in zip(params_of(optimizer), before, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, grad)
        assert not optimizer.state[param]["exp_avg"].requires_grad
