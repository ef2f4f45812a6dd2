# SPDX-License-Identifier: Apache-2.0
"""FusedAdamW with compact moments: their size, their distance from fp32, and saving and loading them."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adamw_pairs import assert_close, assert_identical, params_of, train, two_groups
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from peftds_ext import FusedAdamW
from peftds_ext.optim.formats import dequantize_moment, quantize_moment

COMPACT = ["bf16", "int8"]
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


def trained(states: Any, steps: int = 10, **settings: Any) -> FusedAdamW:
    optimizer = FusedAdamW(two_groups(), states=states, **settings)
    train(optimizer, range(steps))
    return optimizer


def follow(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give ``target`` the parameters and, through a file, the state of ``source``."""
    with torch.no_grad():
        for param, old in zip(params_of(target), params_of(source), strict=True):
            param.copy_(old)
    target.load_state_dict(through_a_file(source.state_dict()))


def moments(state: dict[str, Any], key: str) -> Tensor:
    """Return what the stored moment stands for, in fp32."""
    stored: Tensor = state[key]
    if stored.dtype is not torch.uint8:
        return stored.float()
    scale = state[f"{key}_scale"]
    return dequantize_moment(stored.reshape(-1), scale, MOMENTS[key]).view(stored.shape)


# ---- what is stored --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "dtype", "nbytes"),
    [
        ("fp32", torch.float32, 8 * 1000),
        ("bf16", torch.bfloat16, 4 * 1000),
        ("int8", torch.uint8, 2 * 1000 + 32),
    ],
)
def test_moments_take_the_memory_of_their_form(
    states: Any, dtype: torch.dtype, nbytes: int, kernel_calls: list[Tensor]
) -> None:
    param = Parameter(torch.linspace(-1, 1, 1000).view(10, 100))
    optimizer = FusedAdamW([param], states=states)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizer.state[param]
    assert len(kernel_calls) == 2
    assert sum(value.nbytes for key, value in state.items() if key != "step") == nbytes
    for key in MOMENTS:
        assert state[key].dtype is dtype
        assert state[key].shape == param.shape
        scale = state.get(f"{key}_scale")
        assert (scale is not None) == (states == "int8")
        if scale is not None:
            assert (scale.dtype, scale.shape) == (torch.float32, (4,))
    # Constant gradients give moments of (1 - beta**step), whatever their form.
    for key, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
        expected = torch.full((10, 100), 1 - beta**2)
        torch.testing.assert_close(moments(state, key), expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("states", COMPACT)
def test_elements_are_rounded_independently_of_each_other(states: Any) -> None:
    params = [Parameter(torch.zeros(512)) for _ in range(2)]
    optimizer = FusedAdamW(params, states=states)
    for value in (1.0, 0.3):
        for param in params:
            param.grad = torch.full((512,), value)
            param.grad[::256] = 1.7  # elsewhere in the block, so that no code is exact
        optimizer.step()
    first, second = (optimizer.state[param]["exp_avg"] for param in params)
    assert len(first.unique()) > 2, "stochastic rounding takes both neighbours"
    assert not torch.equal(first, second), "two parameters must not have the same random numbers"


@pytest.mark.parametrize("states", COMPACT)
def test_rounding_to_nearest_gives_the_nearest_and_the_default_does_not(states: Any) -> None:
    grad = torch.randn(600, generator=torch.Generator().manual_seed(0))
    stored = {}
    for rounding in ("nearest", "stochastic"):
        param = Parameter(torch.zeros(600))
        param.grad = grad.clone()
        optimizer = FusedAdamW([param], states=states, rounding=rounding)  # type: ignore[arg-type]
        optimizer.step()
        stored[rounding] = optimizer.state[param]["exp_avg"]
    exact = grad * (1 - 0.9)
    nearest = exact.bfloat16() if states == "bf16" else quantize_moment(exact, True)[0]
    differing = (stored["nearest"].float() != nearest.float()).float().mean()
    assert differing < 0.01, "(1 - beta) may be rounded otherwise, which moves a few over the middle"
    assert (stored["stochastic"].float() != nearest.float()).float().mean() > 0.1


@pytest.mark.parametrize("states", COMPACT)
def test_two_runs_give_the_same_bits(states: Any) -> None:
    assert_identical(trained(states), trained(states))


# ---- how far from fp32 -----------------------------------------------------------------------------


def fit(states: Any, rounding: Any = "stochastic") -> tuple[list[float], Tensor]:
    """Fit a noisy linear model by small batches; return the losses and the weights."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(300, generator=generator)
    weight = Parameter(torch.zeros(300))
    optimizer = FusedAdamW([weight], lr=0.05, weight_decay=0.0, states=states, rounding=rounding)
    losses = []
    for _ in range(50):
        inputs = torch.randn(64, 300, generator=generator)
        targets = inputs @ truth + 0.1 * torch.randn(64, generator=generator)
        loss = torch.nn.functional.mse_loss(inputs @ weight, targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, weight.detach()


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("states", "allowed"), [("bf16", 0.005), ("int8", 0.05)])
def test_fifty_steps_of_a_regression_stay_near_fp32(states: str, allowed: float, rounding: str) -> None:
    exact_losses, exact = fit("fp32")
    losses, weight = fit(states, rounding)
    assert exact_losses[-1] < 0.2 * exact_losses[0]
    assert (weight - exact).norm() < allowed * exact.norm()
    assert losses[-1] == pytest.approx(exact_losses[-1], rel=4 * allowed)
    assert not torch.equal(weight, exact)


def test_a_small_share_of_a_second_moment_is_kept_on_average() -> None:
    # Each step takes a thousandth off, less than half the distance of bf16 numbers.
    kept = {}
    for states, rounding in (("fp32", "nearest"), ("bf16", "stochastic"), ("bf16", "nearest")):
        param = Parameter(torch.zeros(2000))
        optimizer = FusedAdamW([param], states=states, rounding=rounding)  # type: ignore[arg-type]
        param.grad = torch.ones(2000)
        optimizer.step()
        start = optimizer.state[param]["exp_avg_sq"].float().mean()
        param.grad = torch.zeros(2000)
        for _ in range(200):
            optimizer.step()
        kept[states, rounding] = (optimizer.state[param]["exp_avg_sq"].float().mean() / start).item()
    assert kept["fp32", "nearest"] == pytest.approx(0.999**200)
    assert kept["bf16", "stochastic"] == pytest.approx(0.999**200, rel=0.005)
    assert kept["bf16", "nearest"] > 0.95, "if this falls, rounding to nearest has lost its weakness"


# ---- state dicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("states", COMPACT)
def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(
    states: Any, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted = trained(states, 20)
    first, second = trained(states, 10), FusedAdamW(two_groups(), lr=7.0, states=states)
    with caplog.at_level(logging.INFO, logger="peftds_ext"):
        follow(first, second)
    assert_identical(second, first)
    assert second.state_dict()["state"].keys() == first.state_dict()["state"].keys()
    train(second, range(10, 20))
    assert_identical(second, uninterrupted)
    assert not caplog.records, "nothing was converted"


@pytest.mark.parametrize("states", COMPACT)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_keep_form_and_rounding(states: Any, copied: Callable[[Any], Any]) -> None:
    original = trained(states, rounding="nearest")
    twin = copied(original)
    assert (twin.states, twin.rounding) == (states, "nearest")
    for optimizer in (original, twin):
        train(optimizer, range(10, 20))
    assert_identical(twin, original)


@pytest.mark.parametrize("to", ["fp32", *COMPACT])
@pytest.mark.parametrize("source", ["fp32", *COMPACT])
def test_another_form_is_converted_when_it_is_loaded(
    source: Any, to: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = trained(source), FusedAdamW(two_groups(), states=to)
    with caplog.at_level(logging.INFO, logger="peftds_ext"):
        follow(first, second)
        dtypes = {state[key].dtype for state in second.state.values() for key in MOMENTS}
        train(second, range(10, 11))
    assert dtypes == {{"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[to]}
    expected = [] if source == to else [f"moments are converted from {source} to {to}, rounded to nearest"]
    assert [record.getMessage() for record in caplog.records] == expected


@pytest.mark.parametrize("source", ["fp32", "bf16"])
def test_conversion_gives_the_nearest(source: Any) -> None:
    first, second = trained(source), FusedAdamW(two_groups(), states="int8")
    follow(first, second)
    for old, new in zip(params_of(first), params_of(second), strict=True):
        for key, signed in MOMENTS.items():
            codes, scale = quantize_moment(first.state[old][key].float().reshape(-1), signed)
            assert torch.equal(second.state[new][key].reshape(-1), codes)
            assert torch.equal(second.state[new][f"{key}_scale"], scale)
    assert all(
        state[key].dtype is torch.float32 for state in trained("fp32").state.values() for key in MOMENTS
    )


@pytest.mark.parametrize("states", COMPACT)
def test_torch_goes_on_from_compact_moments_by_way_of_fp32(states: Any) -> None:
    compact, between, torchs = trained(states), FusedAdamW(two_groups()), AdamW(two_groups())
    follow(compact, between)
    for old, new in zip(params_of(compact), params_of(between), strict=True):
        for key in MOMENTS:
            assert torch.equal(between.state[new][key], moments(compact.state[old], key))
        assert between.state[new].keys() == {"step", *MOMENTS}
    follow(between, torchs)
    for optimizer in (between, torchs):
        train(optimizer, range(10, 30))
    assert_close(between, torchs)


@pytest.mark.parametrize("states", ["fp32", *COMPACT])
def test_int8_moments_of_a_parameter_that_torch_steps_are_loaded_in_its_dtype(states: Any) -> None:
    first = trained("int8")
    groups = two_groups()
    for group in groups:
        group["params"] = [Parameter(param.detach().bfloat16()) for param in group["params"]]
    second = FusedAdamW(groups, states=states)
    follow(first, second)
    for old, new in zip(params_of(first), params_of(second), strict=True):
        assert second.state[new].keys() == {"step", *MOMENTS}
        for key in MOMENTS:
            expected = moments(first.state[old], key).bfloat16()
            assert torch.equal(second.state[new][key], expected)
    train(second, range(10, 11))


def test_int8_moments_without_scales_are_refused() -> None:
    state = trained("int8").state_dict()
    del state["state"][0]["exp_avg_scale"]
    with pytest.raises(ValueError, match="int8 moments without their scales"):
        FusedAdamW(two_groups(), states="int8").load_state_dict(state)


def test_hooks_for_loading_are_kept_and_ours_goes() -> None:
    seen: list[str] = []
    source, target = trained("int8"), FusedAdamW(two_groups(), states="int8")

    def before(_: Any, state_dict: dict[str, Any]) -> None:
        seen.append(str(state_dict["state"][0]["exp_avg"].dtype))

    target.register_load_state_dict_pre_hook(before)
    target.register_load_state_dict_post_hook(
        lambda o: seen.append(str(o.state[params_of(o)[0]]["exp_avg"].dtype))
    )
    for _ in range(2):
        follow(source, target)
    assert seen == ["torch.uint8"] * 4
    assert len(target._optimizer_load_state_dict_pre_hooks) == 1


# ---- what torch steps, and wrong arguments --------------------------------------------------------------


@pytest.mark.parametrize("states", COMPACT)
def test_what_torch_steps_has_fp32_moments(states: Any, kernel_calls: list[Tensor]) -> None:
    ours, theirs = Parameter(torch.ones(3, 4)), Parameter(torch.ones(4, 3).t())
    optimizer = FusedAdamW([ours, theirs], states=states)
    for param in (ours, theirs):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [id(param) for param in kernel_calls] == [id(ours)]
    assert optimizer.state[ours]["exp_avg"].dtype is not torch.float32
    assert optimizer.state[theirs]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("states", COMPACT)
def test_a_parameter_passes_from_the_kernel_to_torch_and_back(
    states: Any, kernel_calls: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    params = [Parameter(torch.linspace(-1, 1, 24).view(4, 6)) for _ in range(2)]
    compact, exact = FusedAdamW([params[0]], lr=0.1, states=states), AdamW([params[1]], lr=0.1)
    contiguous, transposed = torch.ones(4, 6), torch.ones(6, 4).t()
    with caplog.at_level(logging.INFO, logger="peftds_ext"):
        for grad in (contiguous, transposed, contiguous, transposed):
            for param, optimizer in zip(params, (compact, exact), strict=True):
                param.grad = grad
                optimizer.step()
            is_fp32 = compact.state[params[0]]["exp_avg"].dtype is torch.float32
            assert is_fp32 == (grad is transposed)
    assert len(kernel_calls) == 2
    assert len(caplog.records) == 3, "one for torch's step and one for each way, not at each step"
    torch.testing.assert_close(params[0], params[1], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"states": "fp8"}, "states is 'fp8', but must be one of 'fp32', 'bf16', 'int8'"),
        ({"states": torch.bfloat16}, "states is torch.bfloat16"),
        ({"rounding": "up"}, "rounding is 'up', but must be one of 'stochastic', 'nearest'"),
    ],
)
def test_unknown_choices_are_refused_with_the_known_ones(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedAdamW([Parameter(torch.ones(3))], **arguments)


def test_the_new_arguments_are_keywords_only() -> None:
    param = Parameter(torch.ones(3))
    with pytest.raises(TypeError):
        FusedAdamW([param], 1e-3, (0.9, 0.999), 1e-8, 1e-2, False, "bf16")
    assert "states" not in FusedAdamW([param], states="bf16").param_groups[0], "state dicts are torch's"


def test_state_of_no_parameter_is_loaded_as_it_is() -> None:
    source, target = trained("bf16"), FusedAdamW(two_groups(), states="bf16")
    state = source.state_dict()
    state["state"]["somebody's"] = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    target.load_state_dict(state)
    assert target.state_dict()["state"]["somebody's"] == {
        "exp_avg": torch.ones(1),
        "exp_avg_sq": torch.ones(1),
    }
