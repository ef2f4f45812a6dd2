# SPDX-License-Identifier: Apache-2.0
"""FusedAdamW beside torch.optim.AdamW: the same steps and the same state."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adamw_pairs import SHAPES, assert_close, assert_identical, params_of, train, two_groups
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from peftds_ext import FusedAdamW

# ---- the same steps as torch ---------------------------------------------------------------------


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("lr", [3e-3, torch.tensor(3e-3)], ids=["float", "tensor"])
def test_fifty_steps_are_those_of_torch(lr: Any, maximize: bool, kernel_calls: list[Tensor]) -> None:
    ours, theirs = (cls(two_groups(), lr=lr, maximize=maximize) for cls in (FusedAdamW, AdamW))
    for optimizer in (ours, theirs):
        train(optimizer, range(50))
    assert_close(ours, theirs)
    assert len(kernel_calls) == 50 * len(SHAPES), "all steps must have gone through the kernel"


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.02, 0.01], total_steps=51),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=50),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_without_a_warning(name: str) -> None:
    optimizers = [cls(two_groups(), lr=1e-2) for cls in (FusedAdamW, AdamW)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "lr_scheduler.step() before optimizer.step()"
        for optimizer in optimizers:
            scheduler = SCHEDULERS[name](optimizer)
            for number in range(50):
                train(optimizer, range(number, number + 1))
                scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] != 1e-2
    assert_close(*optimizers)


def test_a_group_added_midway_starts_from_its_own_first_step() -> None:
    optimizers = [cls(two_groups()[:1]) for cls in (FusedAdamW, AdamW)]
    for optimizer in optimizers:
        train(optimizer, range(10))
        optimizer.add_param_group({"params": [Parameter(torch.linspace(-1, 1, 33))], "lr": 0.05})
        train(optimizer, range(10, 50))
    assert_close(*optimizers)
    assert optimizers[0].state[params_of(optimizers[0])[-1]]["step"].item() == 40


def test_a_model_trained_with_a_closure_learns_the_same() -> None:
    def fit(cls: type[torch.optim.Optimizer]) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        inputs, targets = torch.randn(64, 8), torch.randn(64, 1)
        optimizer = cls(model.parameters(), lr=1e-2)
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(50)]
        assert calls == 50
        return losses

    ours, theirs = fit(FusedAdamW), fit(AdamW)
    assert ours[-1] < 0.5 * ours[0]
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_parameters_inside_a_larger_buffer_leave_their_neighbours_alone() -> None:
    flat, expected = torch.ones(100), torch.ones(100)
    param = Parameter(flat[3:40])
    param.grad = torch.arange(37.0)
    FusedAdamW([param], lr=0.1).step()
    alone = Parameter(torch.ones(37))
    alone.grad = torch.arange(37.0)
    FusedAdamW([alone], lr=0.1).step()
    expected[3:40] = alone.detach()
    assert torch.equal(flat, expected)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_read_as_they_are(dtype: torch.dtype, kernel_calls: list[Tensor]) -> None:
    narrow, wide = Parameter(torch.linspace(-1, 1, 99)), Parameter(torch.linspace(-1, 1, 99))
    narrow.grad_dtype = dtype
    grad = torch.linspace(2, -5, 99).to(dtype)
    narrow.grad, wide.grad = grad.clone(), grad.float()
    for param in (narrow, wide):
        FusedAdamW([param], lr=0.1).step()
    assert torch.equal(narrow, wide)
    assert len(kernel_calls) == 2


# ---- state -----------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("later", [FusedAdamW, AdamW])
@pytest.mark.parametrize("earlier", [FusedAdamW, AdamW])
def test_state_moves_between_optimizers_midway(
    earlier: type[torch.optim.Optimizer], later: type[torch.optim.Optimizer]
) -> None:
    first, uninterrupted = earlier(two_groups()), later(two_groups())
    train(first, range(25))
    second = later(two_groups(), lr=7.0)  # settings must come from the state dict as well
    second.load_state_dict(through_a_file(first.state_dict()))
    with torch.no_grad():
        for param, old in zip(params_of(second), params_of(first), strict=True):
            param.copy_(old)
    train(second, range(25, 50))
    train(uninterrupted, range(50))
    if earlier is later:
        assert_identical(second, uninterrupted)
    else:
        assert_close(second, uninterrupted)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_where_the_original_stood(copied: Callable[[Any], Any]) -> None:
    original = FusedAdamW(two_groups())
    train(original, range(10))
    twin = copied(original)
    assert type(twin) is FusedAdamW
    before = [param.clone() for param in params_of(original)]
    train(twin, range(10, 20))
    assert all(torch.equal(p, b) for p, b in zip(params_of(original), before, strict=True))
    train(original, range(10, 20))
    assert_identical(twin, original)


def test_steps_saved_as_numbers_are_loaded() -> None:
    source = FusedAdamW(two_groups())
    train(source, range(3))
    state = source.state_dict()
    for entry in state["state"].values():
        entry["step"] = int(entry["step"])
    target = FusedAdamW(two_groups())
    target.load_state_dict(state)
    train(target, range(3, 4))
    assert all(entry["step"].item() == 4 for entry in target.state.values())
