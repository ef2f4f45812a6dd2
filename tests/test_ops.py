# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the operators on the CPU, against the references that specify them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peftds_ext import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
UNIT = 2.0**-24  # half of fp32's epsilon: the error of one rounding
# Borders of the vectors (8 and 16 elements) and of the blocks that threads share (32768), and between.
BORDERS = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 32767, 32768, 32769, 65537]
SIZES = st.one_of(st.sampled_from(BORDERS), st.integers(0, 5000))
OFFSETS = st.integers(0, 17)  # elements by which an array starts off the allocator's alignment
SEEDS = st.integers(0, 2**32 - 1)


class Placed:
    """A copy of ``values`` inside a larger array whose other elements must stay as they are."""

    def __init__(self, values: Tensor, offset: int) -> None:
        self._around = torch.full((offset + values.numel() + 32,), 7.0, dtype=values.dtype)
        self.tensor = self._around[offset : offset + values.numel()]
        self.tensor.copy_(values)
        self._outside = torch.ones_like(self._around, dtype=torch.bool)
        self._outside[offset : offset + values.numel()] = False

    def nothing_written_outside(self) -> bool:
        return bool((self._around[self._outside] == 7.0).all())


def any_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    return (bits if dtype is torch.float32 else bits.to(torch.int16)).view(dtype)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Same dtype and bits; any NaN equals any NaN."""
    integers = torch.int32 if expected.dtype is torch.float32 else torch.int16
    equal = (actual.view(integers) == expected.view(integers)) | (actual.isnan() & expected.isnan())
    return actual.dtype is expected.dtype and bool(equal.all())


# ---- adamw_step_ ------------------------------------------------------------------------------


class AdamCase(NamedTuple):
    count: int
    seed: int
    offsets: list[int]
    grad_dtype: torch.dtype
    out_dtype: torch.dtype | None
    scales: tuple[float, float]  # of the parameters, of the gradients
    settings: dict[str, Any]


adam_cases = st.builds(
    AdamCase,
    count=SIZES,
    seed=SEEDS,
    offsets=st.lists(OFFSETS, min_size=5, max_size=5),
    grad_dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from((None, *DTYPES)),
    scales=st.tuples(st.sampled_from([1e-3, 1.0, 50.0]), st.sampled_from([1e-5, 1.0, 300.0])),
    settings=st.fixed_dictionaries(
        {
            "lr": st.floats(1e-6, 1.0),
            "beta1": st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.9, 0.99]),
            "beta2": st.sampled_from([0.0, 0.4, 0.9, 0.95, 0.999, 0.9999]),
            "eps": st.sampled_from([1e-12, 1e-8, 1e-3]),
            "weight_decay": st.sampled_from([0.0, 1e-4, 0.1]),
            "step": st.sampled_from([1, 2, 10, 1000, 10**7]),
            "grad_scale": st.sampled_from([1.0, -1.0, 2.0**-16, 0.37]),
            "adamw_mode": st.booleans(),
            "bias_correction": st.booleans(),
        }
    ),
)


def adam_inputs(case: AdamCase) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    param, grad, exp_avg, exp_avg_sq = torch.randn(4, case.count, generator=generator)
    grad = (grad * case.scales[1]).to(case.grad_dtype)
    spread = case.scales[1] * abs(case.settings["grad_scale"])
    return [param * case.scales[0], grad, exp_avg * spread, exp_avg_sq.square() * spread**2]


def rounding_bounds(before: list[Tensor], after: list[Tensor], s: dict[str, Any]) -> list[Tensor]:
    """Largest error of param, exp_avg, exp_avg_sq that a few fp32 roundings per operation explain.

    ``before`` and ``after`` are the fp64 reference's parameter, gradient and moments. Each moment's
    error is relative to the terms that are summed, which may cancel; it is then followed through
    the square root and the quotient into the parameter.
    """
    roundings = 4 * UNIT
    param, grad, exp_avg, exp_avg_sq = before
    decay = 0.0 if s["adamw_mode"] else s["weight_decay"]
    g_terms = (grad * s["grad_scale"]).abs() + decay * param.abs()
    m_error = roundings * (s["beta1"] * exp_avg.abs() + (1 - s["beta1"]) * g_terms)
    v_terms = s["beta2"] * exp_avg_sq + (1 - s["beta2"]) * g_terms.square()
    v_error = 2 * roundings * v_terms + 2.0**-126  # a square has twice the relative error
    new_param, _, m, v = after
    corrected = s["bias_correction"]
    root2 = math.sqrt(1 - s["beta2"] ** s["step"]) if corrected else 1.0
    denominator = v.sqrt() / root2 + s["eps"]
    lowest = ((v - v_error).clamp(min=0).sqrt() / root2 + s["eps"]) * (1 - roundings)
    step_size = s["lr"] / (1 - s["beta1"] ** s["step"] if corrected else 1.0)
    ratio_error = (m.abs() + m_error) / lowest - m.abs() / denominator
    p_error = step_size * (ratio_error + roundings * (m / denominator).abs())
    return [p_error + 2 * UNIT * (param.abs() + new_param.abs()), m_error, v_error]


@settings(deadline=None, max_examples=100)
@given(case=adam_cases)
def test_adamw_step_rounds_like_fp32_arithmetic_on_the_float64_reference(case: AdamCase) -> None:
    inputs = adam_inputs(case)
    placed = [Placed(x, offset) for x, offset in zip(inputs, case.offsets, strict=False)]
    out = None
    if case.out_dtype is not None:
        out = Placed(torch.full((case.count,), 3.0, dtype=case.out_dtype), case.offsets[4])
    param, grad, exp_avg, exp_avg_sq = (p.tensor for p in placed)
    ops.adamw_step_(param, grad, exp_avg, exp_avg_sq, out.tensor if out else None, **case.settings)

    before = [x.double() for x in inputs]
    after = [x.clone() for x in before]
    ops.adamw_step_reference_(*after, **case.settings)
    bounds = rounding_bounds(before, after, case.settings)
    names = ("param", "exp_avg", "exp_avg_sq")
    actuals, references = (param, exp_avg, exp_avg_sq), (after[0], after[2], after[3])
    for name, actual, expected, bound in zip(names, actuals, references, bounds, strict=True):
        error = (actual.double() - expected).abs()
        assert bool((error <= bound).all()), f"{name}: {(error / bound).max()} times the bound"
    assert same_bits(grad, inputs[1]), "grad must only be read"
    if out is not None:
        assert same_bits(out.tensor, param.to(case.out_dtype))
    for p in [*placed, *([out] if out else [])]:
        assert p.nothing_written_outside()


@pytest.mark.parametrize("adamw_mode", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_reference_is_torchs_own_adam_in_float64(adamw_mode: bool, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    start, *grads = torch.randn(21, 100, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    stepper = optimizer([theirs], lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=weight_decay)
    ours, exp_avg, exp_avg_sq = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    settings_ = {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": weight_decay}
    for step, grad in enumerate(grads, start=1):
        theirs.grad = grad.clone()
        stepper.step()
        ops.adamw_step_reference_(
            ours, grad, exp_avg, exp_avg_sq, step=step, adamw_mode=adamw_mode, **settings_
        )
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(exp_avg, stepper.state[theirs]["exp_avg"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(exp_avg_sq, stepper.state[theirs]["exp_avg_sq"], rtol=1e-12, atol=1e-14)


def test_shapes_may_differ_if_the_number_of_elements_agrees() -> None:
    flat = [torch.linspace(-1, 1, 12), torch.ones(12), torch.zeros(12), torch.zeros(12)]
    shaped = [flat[0].clone().view(3, 4), torch.ones(12), torch.zeros(2, 6), torch.zeros(12, 1)]
    for tensors in (flat, shaped):
        ops.adamw_step_(*tensors, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)
    assert torch.equal(shaped[0].flatten(), flat[0])


# ---- cast_into ---------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_pattern_is_cast_as_torch_does(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    out = torch.empty(2**16, dtype=out_dtype)
    ops.cast_into(patterns, out)
    assert same_bits(out, patterns.to(out_dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_is_rounded_to_nearest_even_at_every_border_of_a_16_bit_format(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    exact = values[values.isfinite()].double()
    step = exact.abs().frexp().exponent.clamp(min=-13 if dtype is torch.float16 else -125)
    digits = 11 if dtype is torch.float16 else 8
    middle = (exact + torch.ldexp(torch.full_like(exact, 0.5), step - digits) * exact.sign()).float()
    bits = middle.view(torch.int32)
    borders = torch.cat([bits - 1, bits, bits + 1, exact.float().view(torch.int32)]).view(torch.float32)
    assert int((middle.to(dtype).double() != exact).sum()) > 2**13, "the borders are not where they should be"
    out = torch.empty_like(borders, dtype=dtype)
    ops.cast_into(borders, out)
    assert same_bits(out, borders.to(dtype))


@settings(deadline=None, max_examples=100)
@given(
    count=SIZES,
    seed=SEEDS,
    offsets=st.tuples(OFFSETS, OFFSETS),
    dtypes=st.tuples(*2 * [st.sampled_from(DTYPES)]),
)
def test_cast_into_equals_to_on_any_bits(
    count: int, seed: int, offsets: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    values = any_bits(count, dtypes[0], torch.Generator().manual_seed(seed))
    source = Placed(values, offsets[0])
    target = Placed(torch.full((count,), 3.0, dtype=dtypes[1]), offsets[1])
    ops.cast_into(source.tensor, target.tensor)
    assert same_bits(target.tensor, values.to(dtypes[1]))
    assert same_bits(source.tensor, values)
    assert target.nothing_written_outside()


# ---- squared_norm -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(count=SIZES, seed=SEEDS, offset=OFFSETS, dtype=st.sampled_from(DTYPES))
def test_squared_norm_is_the_sum_of_squares(count: int, seed: int, offset: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Magnitudes over many powers of ten, up to the largest finite value of the dtype.
    top = math.log10(torch.finfo(dtype).max) - 1
    powers = torch.rand(count, generator=generator) * 2 * top - top
    values = (torch.randn(count, generator=generator).clamp(-9, 9) * 10.0**powers).to(dtype)
    result = ops.squared_norm(Placed(values, offset).tensor)
    assert result.shape == ()
    assert result.dtype is torch.float64
    exact = math.fsum(x * x for x in values.tolist())
    assert result.item() == pytest.approx(exact, rel=count * 2.0**-53 + 1e-15, abs=0)
    torch.testing.assert_close(result, ops.squared_norm_reference(values), rtol=1e-12, atol=0)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), count=SIZES.filter(bool), dtype=st.sampled_from(DTYPES))
def test_squared_norm_is_finite_only_if_all_elements_are(
    data: st.DataObject, count: int, dtype: torch.dtype
) -> None:
    values = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
    assert math.isfinite(ops.squared_norm(values).item())
    where = data.draw(st.one_of(st.integers(0, count - 1), st.integers(max(0, count - 17), count - 1)))
    values[where] = data.draw(st.sampled_from([math.inf, -math.inf, math.nan, -math.nan]))
    assert not math.isfinite(ops.squared_norm(values).item())


# ---- accumulate_ ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(
    count=SIZES,
    seed=SEEDS,
    offsets=st.tuples(OFFSETS, OFFSETS),
    dtypes=st.tuples(*2 * [st.sampled_from(DTYPES)]),
    add=st.booleans(),
    wild=st.booleans(),
)
def test_accumulate_copies_or_adds_and_returns_the_squared_norm(
    count: int,
    seed: int,
    offsets: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    add: bool,
    wild: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, new = torch.randn(2, count, generator=generator)
    if wild:  # overflow, infinities, NaNs and their sums
        old, new = any_bits(count, torch.float32, generator), any_bits(count, torch.float32, generator)
    buffer, grad = Placed(old.to(dtypes[0]), offsets[0]), Placed(new.to(dtypes[1]), offsets[1])
    expected = old.to(dtypes[0])
    ops.accumulate_reference_(expected, new.to(dtypes[1]), add)

    norm = ops.accumulate_(buffer.tensor, grad.tensor, add)
    assert same_bits(buffer.tensor, expected)
    assert norm.dtype is torch.float64
    again = ops.squared_norm(buffer.tensor)
    assert torch.equal(norm, again) or (norm.isnan() and again.isnan())
    assert same_bits(grad.tensor, new.to(dtypes[1]))
    assert buffer.nothing_written_outside()


@pytest.mark.parametrize("dtype", HALVES)
def test_accumulate_adds_in_fp32_and_rounds_once(dtype: torch.dtype) -> None:
    # The sum lies just above the middle between two 16-bit values, by less than the format can hold.
    digits = 10 if dtype is torch.float16 else 7
    buffer = torch.ones(20, dtype=dtype)
    ops.accumulate_(buffer, torch.full((20,), 2.0 ** -(digits + 1) + 2.0**-20), add=True)
    assert torch.equal(buffer, torch.full((20,), 1 + 2.0**-digits, dtype=dtype))
