# SPDX-License-Identifier: Apache-2.0
"""Conversions between fp32 states and the compact forms that :func:`peftds_ext.ops.adamw_step_` reads.

For use where states are loaded, saved or made; the step itself converts as it goes. Results have the same
bits as the kernel's, which encodes as ``csrc/kernels/dynamic_map.h`` explains. All tensors are
one-dimensional and in host memory; work goes in slices, so that little memory is needed beside the result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from peftds_ext.ops import MOMENT_BLOCK

_SLICE = 1 << 20  # elements; a multiple of MOMENT_BLOCK
_DECADE_ENDS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_UNIT = 65536.0  # the kernel computes codes in units of 1 / 65536


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return an fp32 master's bf16 weights and int16 remainders; NaNs become the quiet NaN of their sign.

    Raises:
        ValueError: ``master`` has another dtype or shape.
    """
    _check(master, "master", torch.float32)
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    for part in _slices(master.numel()):
        bits = master[part].view(torch.int32)
        quiet = torch.where(bits < 0, -0x400000, 0x7FC00000).to(torch.int32)
        bits = torch.where(master[part].isnan(), quiet, bits)
        low = bits.to(torch.int16)  # modulo 2^16
        weight.view(torch.int16)[part] = ((bits - low) >> 16).to(torch.int16)
        remainder[part] = low
    return weight, remainder


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master of bf16 weights and int16 remainders.

    Raises:
        ValueError: a tensor has another dtype or shape.
    """
    _check(weight, "weight", torch.bfloat16)
    _check(remainder, "remainder", torch.int16, weight.numel())
    master = torch.empty_like(weight, dtype=torch.float32)
    for part in _slices(weight.numel()):
        high = weight[part].view(torch.int16).to(torch.int32) << 16
        master.view(torch.int32)[part] = high + remainder[part].to(torch.int32)
    return master


def quantize_moment(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the uint8 codes, rounded to nearest, of an fp32 moment, and each block's largest magnitude.

    Args:
        x: first moment, or second moment (not negative).
        signed: true for a first moment. In a second moment what is above 0 stays above 0.

    Raises:
        ValueError: ``x`` has another dtype or shape.
    """
    _check(x, "x", torch.float32)
    codes = torch.empty_like(x, dtype=torch.uint8)
    absmax = x.new_empty(-(-x.numel() // MOMENT_BLOCK))
    for part in _slices(x.numel()):
        block = slice(part.start // MOMENT_BLOCK, -(-part.stop // MOMENT_BLOCK))
        blocks = _in_blocks(x[part])
        sizes = blocks.abs()
        largest = sizes.amax(1)
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny).where(largest != 0, largest)
        scale = scale.where(largest.isfinite(), torch.nan)
        inverse = (1.0 / scale).where(largest.isfinite() & (largest != 0), 0.0)
        k = _nearest(_map(signed), sizes.mul_(inverse.unsqueeze(1)))
        if signed:
            k = torch.where(torch.signbit(blocks), -k, k).add_(127).clamp_(min=0)
        else:
            k = torch.where(blocks == 0, k, k.clamp(min=1))
        codes[part] = k.flatten()[: part.stop - part.start].to(torch.uint8)
        absmax[block] = scale
    return codes, absmax


def dequantize_moment(codes: Tensor, absmax: Tensor, signed: bool) -> Tensor:
    """Return the fp32 moment of uint8 codes and the largest magnitudes of their blocks.

    Raises:
        ValueError: a tensor has another dtype or shape.
    """
    _check(codes, "codes", torch.uint8)
    _check(absmax, "absmax", torch.float32, -(-codes.numel() // MOMENT_BLOCK))
    values = _map(signed).values
    x = torch.empty_like(codes, dtype=torch.float32)
    for part in _slices(codes.numel()):
        scale = absmax[part.start // MOMENT_BLOCK : -(-part.stop // MOMENT_BLOCK)]
        blocks = values[_in_blocks(codes[part]).int()].mul_(scale.unsqueeze(1))
        x[part] = blocks.flatten()[: part.stop - part.start]
    return x


class _Map(NamedTuple):
    """The kernel's fp32 constants of one dynamic map, and the values of its codes; see dynamic_map.h."""

    values: Tensor
    slope: Tensor
    intercept: Tensor
    ends: Tensor
    slope_to_zero: Tensor
    last: int


@functools.cache
def _map(signed: bool) -> _Map:
    cells = [float((1 if signed else 2) << i) for i in range(7)]
    decades = list(zip(cells, _DECADE_ENDS, strict=True))
    last = 128 if signed else 255
    slope = _float32([_UNIT * (n / (end * 0.9)) for n, end in decades])
    intercept = _float32([_UNIT * (n * (0.8 / 0.9) - (0.5 if signed else 1.5)) for n, _ in decades])
    last_slope = 2.0 * slope[-1:]
    first_value = _DECADE_ENDS[0] * (0.1 + 0.9 * 0.5 / cells[0])
    last_end = 0.1 + 0.9 * (1.0 - 0.5 / cells[6])
    return _Map(
        values=_values(decades, signed),
        slope=torch.cat([slope, last_slope]),
        intercept=torch.cat([intercept, _UNIT * last - last_slope]),
        ends=_float32([*_DECADE_ENDS[:6], last_end]),
        slope_to_zero=_float32([_UNIT / first_value]),
        last=last,
    )


def _values(decades: list[tuple[float, float]], signed: bool) -> Tensor:
    """The values in the order of their codes: in each decade a line, as the kernel rounds it."""
    parts = [torch.zeros(1)]
    for n, end in decades:
        step = _float32([end * 0.9 / n])
        first_q = n + 0.5 if signed else n
        start = (end * (0.1 + 0.9 * 0.5 / n) - step.double() * first_q).float()
        q = torch.arange(int(n), dtype=torch.float64) + first_q
        parts.append((q * step.double() + start.double()).float())
    parts.append(torch.ones(1))
    values = torch.cat(parts)
    return torch.cat([-values[1:-1].flip(0), values]) if signed else values


def _nearest(dynamic_map: _Map, x: Tensor) -> Tensor:
    """k of the fractions ``x``, with the kernel's roundings; where ``x`` is NaN, the last."""
    decade = torch.bucketize(x, dynamic_map.ends, right=True, out_int32=True)
    k = (x * dynamic_map.slope[decade]).add_(dynamic_map.intercept[decade])
    k = torch.minimum(k, x * dynamic_map.slope_to_zero).nan_to_num_(nan=torch.inf)
    return k.clamp_(max=_UNIT * dynamic_map.last).to(torch.int32).add_(0x8000) >> 16


def _float32(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, _SLICE):
        yield slice(start, min(start + _SLICE, count))


def _in_blocks(part: Tensor) -> Tensor:
    return torch.nn.functional.pad(part, (0, -part.numel() % MOMENT_BLOCK)).view(-1, MOMENT_BLOCK)


def _check(tensor: Tensor, name: str, dtype: torch.dtype, count: int | None = None) -> None:
    if tensor.dtype is not dtype or tensor.dim() != 1:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name} must be one-dimensional, of {dtype}; got {tensor.dtype} of shape {shape}")
    if count is not None and tensor.numel() != count:
        raise ValueError(f"{name} must have {count} elements, got {tensor.numel()}")
