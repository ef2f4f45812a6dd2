# SPDX-License-Identifier: Apache-2.0
"""Adam steps on compact states: split masters, bf16 and uint8 moments, against the references."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from peftds_ext import ops
from peftds_ext.optim.formats import dequantize_moment, join_master, quantize_moment, split_master

ADAMW: dict[str, Any] = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "step": 3,
}
KEEP: dict[str, Any] = {"beta1": 1.0, "beta2": 1.0, "weight_decay": 0.0, "step": 1, "bias_correction": False}
MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
SIZES = (1, 16, 255, 256, 257, 5000)

State = dict[str, Any]


def make_state(
    count: int, split: bool, moments: torch.dtype, grad_dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> State:
    """Return the tensors of adamw_step_ by name, with moments that vary over nine powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    param, grad, exp_avg = torch.randn(3, count, generator=generator)
    exp_avg = exp_avg * 10.0 ** (torch.rand(count, generator=generator) * 9 - 9)
    exp_avg_sq = exp_avg.square() * (0.5 + torch.rand(count, generator=generator))
    state = {"param": param, "grad": (grad * 1e-2).to(grad_dtype)}
    if moments is torch.uint8:
        state["exp_avg"], state["exp_avg_scale"] = quantize_moment(exp_avg, signed=True)
        state["exp_avg_sq"], state["exp_avg_sq_scale"] = quantize_moment(exp_avg_sq, signed=False)
    else:
        state["exp_avg"], state["exp_avg_sq"] = exp_avg.to(moments), exp_avg_sq.to(moments)
    if split:
        state["out"], state["param"] = split_master(param)
    return state


def copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def plain(state: State) -> State:
    """The same state in fp32."""
    result = {"grad": state["grad"]}
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        scale = state.get(f"{name}_scale")
        stored = state[name]
        result[name] = stored.float().clone() if scale is None else dequantize_moment(stored, scale, signed)
    result["param"] = join_master(state["out"], state["param"]) if "out" in state else state["param"].clone()
    return result


# ---- the step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", SIZES)
def test_a_step_is_the_plain_step_between_decoding_and_encoding(
    count: int, split: bool, moments: torch.dtype
) -> None:
    state = make_state(count, split, moments)
    expected = plain(state)
    ops.adamw_step_(**expected, **ADAMW)
    ops.adamw_step_(**state, **ADAMW, stochastic=False)
    assert torch.equal(plain(state)["param"], expected["param"])
    if moments is not torch.uint8:
        assert torch.equal(state["exp_avg"], expected["exp_avg"].to(moments))
        assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"].to(moments))
        return
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes, scale = quantize_moment(expected[name], signed)
        assert torch.equal(state[name], codes)
        assert torch.equal(state[f"{name}_scale"], scale)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", SIZES)
def test_a_step_is_what_the_reference_says(count: int, split: bool, moments: torch.dtype) -> None:
    state = make_state(count, split, moments, torch.float32)
    expected = copy(state)
    ops.adamw_step_(**state, **ADAMW, stochastic=False)
    ops.adamw_step_reference_(**expected, **ADAMW)
    ours, theirs = plain(state), plain(expected)
    torch.testing.assert_close(ours["param"], theirs["param"], rtol=1e-5, atol=1e-6)
    if moments is not torch.uint8:
        tolerance = 2.0**-7 if moments is torch.bfloat16 else 1e-5
        torch.testing.assert_close(ours["exp_avg"], theirs["exp_avg"], rtol=tolerance, atol=1e-9)
        torch.testing.assert_close(ours["exp_avg_sq"], theirs["exp_avg_sq"], rtol=tolerance, atol=1e-12)
        return
    for name in ("exp_avg", "exp_avg_sq"):  # a value at the border of two codes may get either
        distance = (state[name].int() - expected[name].int()).abs()
        assert int(distance.max()) <= 1
        assert int((distance != 0).sum()) <= count // 500
        torch.testing.assert_close(state[f"{name}_scale"], expected[f"{name}_scale"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("moments", [torch.bfloat16, torch.uint8])
def test_stochastic_rounding_gives_a_neighbour_and_the_expectation(moments: torch.dtype) -> None:
    # The moments become the gradient and its square, which lie inside of decades; the first of a block is 1.
    grad = torch.full((400, 256), 0.0345)
    grad[:, 0] = 1.0
    forget = {**ADAMW, "lr": 0.0, "beta1": 0.0, "beta2": 0.0}
    state = make_state(grad.numel(), False, moments, torch.float32)
    state["grad"] = grad.flatten()
    down, chance = copy(state), copy(state)
    ops.adamw_step_(**down, **forget, stochastic=False)
    ops.adamw_step_(**chance, **forget)
    for name, exact in (("exp_avg", grad[0, 1]), ("exp_avg_sq", grad[0, 1].square())):
        values = plain(chance)[name].view(400, 256)[:, 1:].double()
        nearest = plain(down)[name].view(400, 256)[0, 1].double()
        low, high = values.min(), values.max()
        assert low < exact < high
        assert set(values.unique().tolist()) == {low.item(), high.item()}
        assert nearest in (low, high)
        share = (exact - low) / (high - low)
        sigma = (high - low) * (share * (1 - share) / values.numel()).sqrt()
        assert abs(values.mean() - exact) < 5 * sigma


def test_stochastic_rounding_repeats_and_follows_step_and_place() -> None:
    start = make_state(4096, True, torch.uint8)

    def after(**changed: Any) -> Tensor:
        state = copy(start)
        ops.adamw_step_(**state, **{**ADAMW, **changed})
        codes: Tensor = state["exp_avg"]
        return codes

    assert torch.equal(after(), after())
    assert torch.equal(after(), after(first_element=0, stochastic=True))
    assert not torch.equal(after(), after(first_element=256))
    assert not torch.equal(after(), after(stochastic=False))

    pieces = copy(start)
    for first in range(0, 4096, 1024):
        piece = {}
        for name, tensor in pieces.items():
            size = 256 if name.endswith("scale") else 1
            piece[name] = tensor[first // size : (first + 1024) // size]
        ops.adamw_step_(**piece, **ADAMW, first_element=first)
    assert torch.equal(pieces["exp_avg"], after())


@pytest.mark.parametrize("signed", [False, True])
def test_codes_are_those_of_the_definition(signed: bool) -> None:
    values, borders = ops.dynamic_map_reference(signed)
    assert values.shape == (256,)
    assert bool((values.diff() > 0).all())
    assert bool(((values[:-1] < borders) & (borders < values[1:])).all())
    state = make_state(256, False, torch.uint8, torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    state.update(exp_avg=codes, exp_avg_sq=codes.clone(), grad=torch.zeros(256), param=torch.zeros(256))
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        state[name].fill_(1.0)
    if signed:  # the parameter becomes the first moment: the second one is nothing beside eps
        ops.adamw_step_(**state, **KEEP, lr=-(2.0**60), eps=2.0**60)
    else:  # the second moment is left when a gradient of 1 is the first one
        state["grad"].fill_(1.0)
        ops.adamw_step_(**state, **{**KEEP, "beta1": 0.0}, lr=-1.0, eps=0.0)
        state["param"] = state["param"].double().pow(-2)
    torch.testing.assert_close(state["param"].double(), values, rtol=1e-6, atol=0)


# ---- refusals -------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, Callable[[State], Any]]] = {
    "param of another dtype": ("param", lambda s: s.update(param=s["param"].to(torch.int32))),
    "int16 param without out": ("out", lambda s: s.pop("out")),
    "int16 param with fp16 out": ("out", lambda s: s.update(out=s["out"].half())),
    "moments of two dtypes": ("exp_avg_sq", lambda s: s.update(exp_avg_sq=torch.zeros(1000))),
    "fp16 moments": ("exp_avg", lambda s: s.update(exp_avg=s["exp_avg"].half())),
    "int8 moments": ("exp_avg", lambda s: s.update(exp_avg=s["exp_avg"].to(torch.int8))),
    "shorter codes": ("exp_avg_sq", lambda s: s.update(exp_avg_sq=s["exp_avg_sq"][:-1])),
    "strided codes": ("exp_avg", lambda s: s.update(exp_avg=s["exp_avg"].repeat(2)[::2])),
    "no scale": ("exp_avg_scale", lambda s: s.pop("exp_avg_scale")),
    "no second scale": ("exp_avg_sq_scale", lambda s: s.pop("exp_avg_sq_scale")),
    "shorter scale": ("exp_avg_scale", lambda s: s.update(exp_avg_scale=torch.ones(3))),
    "longer scale": ("exp_avg_sq_scale", lambda s: s.update(exp_avg_sq_scale=torch.ones(5))),
    "fp64 scale": ("exp_avg_scale", lambda s: s.update(exp_avg_scale=s["exp_avg_scale"].double())),
    "strided scale": ("exp_avg_sq_scale", lambda s: s.update(exp_avg_sq_scale=torch.ones(8)[::2])),
    "scale of fp32 moments": (
        "exp_avg_scale",
        lambda s: s.update(exp_avg=torch.zeros(1000), exp_avg_sq=torch.zeros(1000)),
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_argument_is_named_and_nothing_is_changed(fault: str, device: str) -> None:
    name, spoil = FAULTS[fault]
    state = make_state(1000, True, torch.uint8)
    spoil(state)
    copies = copy(state)
    if device == "meta":
        state = {n: t.to("meta") if t.is_contiguous() else _strided(t) for n, t in state.items()}
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        ops.adamw_step_(**state, **ADAMW)
    assert device == "meta" or all(torch.equal(state[n], copies[n]) for n in state)


def _strided(tensor: Tensor) -> Tensor:
    return torch.empty(2 * tensor.numel(), dtype=tensor.dtype, device="meta")[::2]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_places_count_from_zero(device: str) -> None:
    state = {name: tensor.to(device) for name, tensor in make_state(10, True, torch.uint8).items()}
    with pytest.raises(RuntimeError, match="first_element counts from 0"):
        ops.adamw_step_(**state, **ADAMW, first_element=-1)


# ---- torch.library, autograd ------------------------------------------------------------------------


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck(count: int, split: bool, moments: torch.dtype) -> None:
    state = make_state(count, split, moments)
    torch.library.opcheck(torch.ops.peftds_ext.adamw_step_.default, (), {**state, **ADAMW})


def test_a_compiled_step_gives_the_same() -> None:
    torch._dynamo.reset()
    state = make_state(1000, True, torch.uint8)
    expected = copy(state)

    def step(state: State) -> Tensor:
        ops.adamw_step_(**state, **ADAMW, first_element=512)
        total: Tensor = state["exp_avg_scale"].sum() + state["out"].float().sum()
        return total

    result = torch.compile(step, backend="aot_eager", fullgraph=True)(state)
    assert torch.equal(result, step(expected))
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


def test_autograd_notices_all_that_a_step_changes() -> None:
    state = make_state(100, True, torch.uint8)
    versions = {name: tensor._version for name, tensor in state.items()}
    ops.adamw_step_(**state, **ADAMW)
    changed = {name for name, tensor in state.items() if tensor._version > versions[name]}
    assert changed == set(state) - {"grad"}


def test_a_spoilt_block_is_nan_in_the_next_step_and_no_other() -> None:
    state = make_state(1000, True, torch.uint8, torch.float32)
    state["grad"][300] = math.inf
    ops.adamw_step_(**state, **ADAMW)
    assert state["exp_avg_scale"].isnan().tolist() == [False, True, False, False]
    state["grad"][300] = 0.0
    ops.adamw_step_(**state, **ADAMW)
    assert torch.equal(state["out"].isnan(), torch.arange(1000) // 256 == 1)
