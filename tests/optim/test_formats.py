# SPDX-License-Identifier: Apache-2.0
"""Conversions between fp32 states and their compact forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peftds_ext import ops
from peftds_ext.optim import formats
from peftds_ext.optim.formats import dequantize_moment, join_master, quantize_moment, split_master

SIGNED = pytest.mark.parametrize("signed", [False, True])


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


# ---- masters ----------------------------------------------------------------------------------------


def test_every_master_but_nans_comes_back_with_the_same_bits() -> None:
    high = torch.arange(-(2**15), 2**15, dtype=torch.int64).unsqueeze(1) << 16
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    master = (high + low).flatten().to(torch.int32).view(torch.float32)
    weight, remainder = split_master(master)
    joined = join_master(weight, remainder)
    nan = master.isnan()
    assert torch.equal(bits_of(joined)[~nan], bits_of(master)[~nan])
    quiet = torch.where(bits_of(master) < 0, -0x400000, 0x7FC00000).to(torch.int32)
    assert torch.equal(bits_of(joined)[nan], quiet[nan])
    assert torch.equal(weight.isnan(), nan)


def test_the_weight_is_the_master_rounded_to_nearest_a_tie_away_from_zero() -> None:
    master = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(split_master(master)[0], master.bfloat16())
    tie = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8])
    assert split_master(tie)[0].tolist() == [1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7]


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_slices_do_not_change_the_result(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))

    def all_results() -> list[Tensor]:
        codes, absmax = quantize_moment(x, signed=True)
        return [
            *split_master(x),
            join_master(*split_master(x)),
            codes,
            dequantize_moment(codes, absmax, True),
        ]

    whole = all_results()
    monkeypatch.setattr(formats, "_SLICE", 256)
    for one, other in zip(whole, all_results(), strict=True):
        assert torch.equal(one, other)


# ---- moments ----------------------------------------------------------------------------------------


@SIGNED
def test_values_are_those_of_the_definition(signed: bool) -> None:
    values = dequantize_moment(torch.arange(256, dtype=torch.uint8), torch.ones(1), signed).double()
    torch.testing.assert_close(values, ops.dynamic_map_reference(signed)[0], rtol=1e-6, atol=0)


@SIGNED
@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 2000), size=st.sampled_from([1e-30, 1.0, 1e18]))
def test_codes_are_the_nearest_and_the_kernels(signed: bool, seed: int, count: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * 10.0 ** (torch.rand(count, generator=generator) * 9 - 9)
    x = x * size if signed else (x * size).square()
    codes, absmax = quantize_moment(x, signed)
    expected, scale = torch.empty_like(codes), torch.empty_like(absmax)
    ops._encode(x, expected, scale, signed)
    assert torch.equal(absmax, scale)
    distance = (codes.int() - expected.int()).abs()
    assert int(distance.max()) <= 1
    assert int((distance != 0).sum()) <= 2, "only at the border of two codes"

    # A step in which the moment becomes the gradient, or its square.
    root = x if signed else x.sqrt()
    tensors = [torch.zeros(count), root, *(torch.zeros(count, dtype=torch.uint8) for _ in range(2))]
    scales: dict[str, Any] = {
        "exp_avg_scale": torch.zeros_like(scale),
        "exp_avg_sq_scale": torch.zeros_like(scale),
    }
    ops.adamw_step_(
        *tensors, **scales, lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1, stochastic=False
    )
    codes, absmax = quantize_moment(root if signed else root.square(), signed)
    assert torch.equal(tensors[2 if signed else 3], codes)
    assert torch.equal(scales["exp_avg_scale" if signed else "exp_avg_sq_scale"], absmax)


@SIGNED
def test_special_blocks(signed: bool) -> None:
    zeros, tiny, nan, infinite = torch.zeros(256), torch.zeros(256), torch.ones(256), torch.ones(256)
    tiny[3], nan[4], infinite[5] = 1e-45, torch.nan, torch.inf
    codes, absmax = quantize_moment(torch.cat([zeros, tiny, nan, infinite]), signed)
    assert absmax[:2].tolist() == [0.0, torch.finfo(torch.float32).tiny]
    assert bool(absmax[2:].isnan().all())
    values = dequantize_moment(codes, absmax, signed)
    assert torch.equal(values[:256], zeros)
    assert bool(values[512:].isnan().all())


def test_a_second_moment_above_zero_stays_above_zero() -> None:
    x = torch.tensor([1.0, 0.0, 1e-12, 1e-45])
    codes, absmax = quantize_moment(x, signed=False)
    assert codes.tolist() == [255, 0, 1, 1]
    assert (dequantize_moment(codes, absmax, signed=False) > 0).tolist() == [True, False, True, True]
    assert quantize_moment(x, signed=True)[0].tolist() == [255, 127, 127, 127]


WRONG: list[tuple[str, Callable[[], object]]] = [
    ("master", lambda: split_master(torch.zeros(4, dtype=torch.float64))),
    ("master", lambda: split_master(torch.zeros(2, 2))),
    ("weight", lambda: join_master(torch.zeros(4), torch.zeros(4, dtype=torch.int16))),
    ("remainder", lambda: join_master(torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int32))),
    ("remainder", lambda: join_master(torch.zeros(4).bfloat16(), torch.zeros(3, dtype=torch.int16))),
    ("x", lambda: quantize_moment(torch.zeros(4).half(), signed=True)),
    ("codes", lambda: dequantize_moment(torch.zeros(4), torch.zeros(1), signed=True)),
    ("absmax", lambda: dequantize_moment(torch.zeros(257, dtype=torch.uint8), torch.zeros(1), signed=True)),
]


@pytest.mark.parametrize(("name", "call"), WRONG)
def test_wrong_arguments_are_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must "):
        call()
