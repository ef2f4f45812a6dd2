# SPDX-License-Identifier: Apache-2.0
"""Compares the CUDA operators with the CPU ones; gpu_check.py runs this.

``comparisons(device)`` takes a device so that the comparing itself can be tried without a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from gpu_checking import Check, all_right
from torch import Tensor

from peftds_ext import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 3, 4, 5, 255, 1023, 1024, 1025, 1_000_003)
LARGE = 36_000_001  # more groups of four than one sweep of the grid, so that threads loop
SETTINGS: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "step": 3,
    "grad_scale": 0.5,
}


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Compare bit patterns, so that -0 and 0 differ and NaNs can be equal."""
    view = torch.int32 if expected.dtype == torch.float32 else torch.int16
    return torch.equal(got.cpu().view(view), expected.cpu().view(view))


def place(tensor: Tensor, offset: int, device: str) -> Tensor:
    """Copy to ``device``, ``offset`` elements behind an aligned address."""
    room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
    return room[offset:].copy_(tensor)


def adam_inputs(size: int, grad: torch.dtype, out: torch.dtype | None, seed: int = 0) -> list[Tensor | None]:
    """Return param, grad, exp_avg, exp_avg_sq and out, with magnitudes that vary."""
    random = torch.Generator().manual_seed(seed)

    def values(low: float, high: float) -> Tensor:
        power = torch.empty(size).uniform_(low, high, generator=random)
        sign = torch.randint(0, 2, (size,), generator=random) * 2.0 - 1.0
        return torch.pow(10.0, power) * sign

    result: list[Tensor | None] = [values(-3, 1), values(-4, 0).to(grad), values(-4, 0), values(-8, 0).abs()]
    return [*result, None if out is None else torch.zeros(size, dtype=out)]


def adam_matches(inputs: list[Tensor | None], offset: int, device: str, **modes: Any) -> bool:
    """Run the step on the CPU and on ``device``; True if all arrays end with the same bits."""
    moved = [None if tensor is None else place(tensor, offset, device) for tensor in inputs]
    expected = [None if tensor is None else tensor.clone() for tensor in inputs]
    ops.adamw_step_(*expected, **SETTINGS, **modes)
    ops.adamw_step_(*moved, **SETTINGS, **modes)
    return all(b is None or same_bits(a, b) for a, b in zip(moved, expected, strict=True))


def check_adam(device: str) -> Iterator[Check]:
    """All dtypes, sizes, alignments and modes; then one array that makes the threads loop."""
    modes = list(itertools.product((True, False), (0.1, 0.0), (True, False)))
    for grad, out in itertools.product(DTYPES, (None, *DTYPES)):
        wrong = []
        for size, offset in itertools.product(SIZES, (0, 1)):
            inputs = adam_inputs(size, grad, out)
            wrong += [
                f"size {size}, offset {offset}, adamw {adamw}, decay {decay}, correction {correction}"
                for adamw, decay, correction in (modes if size == 1025 else modes[:1])
                if not adam_matches(
                    inputs, offset, device, adamw_mode=adamw, weight_decay=decay, bias_correction=correction
                )
            ]
        yield all_right(f"adamw_step_ grad {grad} out {out}", wrong)
    for offset in (0, 1):
        inputs = adam_inputs(LARGE, torch.bfloat16, torch.bfloat16)
        passed = adam_matches(inputs, offset, device, weight_decay=0.1)
        yield Check(f"adamw_step_ {LARGE} elements, offset {offset}", passed)


def every_pattern(dtype: torch.dtype, size: int) -> Tensor:
    """Return ``size`` elements with every kind of bits, NaNs and subnormals included."""
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (size,), generator=torch.Generator().manual_seed(1))
        return bits.to(torch.int32).view(dtype)
    return (torch.arange(size) % 65536 - 32768).to(torch.int16).view(dtype)


def check_cast(device: str) -> Iterator[Check]:
    """All pairs of dtypes, over all kinds of bits."""
    for source, target in itertools.product(DTYPES, DTYPES):
        wrong = []
        for size, offset in itertools.product((*SIZES, LARGE if source != target else 65536), (0, 1)):
            tensor = every_pattern(source, size)
            expected = torch.zeros(size, dtype=target)
            got = place(expected, offset, device)
            ops.cast_into(tensor, expected)
            ops.cast_into(place(tensor, offset, device), got)
            if not same_bits(got, expected):
                wrong.append(f"size {size}, offset {offset}")
        yield all_right(f"cast_into {source} to {target}", wrong)


def check_norm(device: str) -> Iterator[Check]:
    """Value, repeatability, independence of alignment, and the finite property."""
    for dtype in DTYPES:
        wrong = []
        for size in (*SIZES, LARGE):
            tensor = adam_inputs(size, dtype, None)[1]
            assert tensor is not None
            expected = ops.squared_norm(tensor).item()
            results = [ops.squared_norm(place(tensor, offset, device)).item() for offset in (0, 0, 1)]
            if len(set(results)) != 1 or abs(results[0] - expected) > 1e-12 * expected:
                wrong.append(f"size {size}: {results}, on the CPU {expected}")
        yield all_right(f"squared_norm {dtype}", wrong)
        wrong = []
        for bad in (float("inf"), float("-inf"), float("nan")):
            for where in (0, 1, 65_535, 99_999):
                tensor = torch.ones(100_000, dtype=dtype, device=device)
                tensor[where] = bad
                if ops.squared_norm(tensor).isfinite().item():
                    wrong.append(f"{bad} at {where} was not seen")
        largest = torch.full((100_000,), torch.finfo(dtype).max, dtype=dtype, device=device)
        if not ops.squared_norm(largest).isfinite().item():
            wrong.append("the largest finite values overflowed")
        yield all_right(f"squared_norm {dtype}: finite if and only if all elements are", wrong)


def check_opcheck(device: str) -> Iterator[Check]:
    """Schema, fake version and dispatch, as torch.library.opcheck sees them."""
    operators = torch.ops.peftds_ext
    inputs = [None if t is None else t.to(device) for t in adam_inputs(100, torch.bfloat16, torch.bfloat16)]
    samples = {
        "adamw_step_": (inputs, {**SETTINGS, "weight_decay": 0.1}),
        "squared_norm": ([inputs[0]], {}),
        "cast_into": ([inputs[0], inputs[4]], {}),
    }
    for name, (arguments, keywords) in samples.items():
        try:
            torch.library.opcheck(getattr(operators, name).default, tuple(arguments), keywords)
            yield Check(f"opcheck {name}", True)
        except Exception as error:
            yield Check(f"opcheck {name}", False, str(error)[:500])


def cuda_behaviour() -> Iterator[Check]:
    """Work runs on torch's current stream, on the tensor's own device, and mixed devices are refused."""
    tensor = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s, in which work on any other stream would overtake
        tensor.fill_(2.0)
        norm = ops.squared_norm(tensor)
    stream.synchronize()
    yield Check("work runs on the current stream", norm.item() == 4000.0, f"got {norm.item()}")
    last = torch.cuda.device_count() - 1
    other = torch.full((1000,), 3.0, device=f"cuda:{last}")
    norm = ops.squared_norm(other)
    passed = norm.item() == 9000.0 and norm.device == other.device and torch.cuda.current_device() == 0
    yield Check(f"work runs on device {last} of {last + 1}", passed, f"got {norm.item()} on {norm.device}")
    try:
        ops.cast_into(torch.ones(5), torch.ones(5, device="cuda"))
        yield Check("mixed devices are refused", False, "no error")
    except RuntimeError as error:
        yield Check("mixed devices are refused", "same device" in str(error), str(error)[:200])


def comparisons(device: str) -> Iterator[Check]:
    """Run every check that does not depend on what CUDA alone has."""
    yield from check_adam(device)
    yield from check_cast(device)
    yield from check_norm(device)
    yield from check_opcheck(device)
