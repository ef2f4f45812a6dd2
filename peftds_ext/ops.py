# SPDX-License-Identifier: Apache-2.0
"""The operators ``torch.ops.peftds_ext.*``: documentation, fake versions, and references.

Schemas and CPU implementations are registered by the compiled core, CUDA ones by ``_cuda``. Each
operator has a fake version here, so that ``torch.compile`` and ``torch.export`` accept it, and a
plain-torch reference that is its specification: tests compare every implementation with it.

All tensors must be strided, contiguous and on one device; what breaks this raises RuntimeError and names
the argument. Tensors that are written must not overlap others, which is not checked. Nothing here is
differentiable, and settings such as a negative ``eps`` are the caller's to check.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peftds_ext import _native

_native.core()

LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_BLOCK = 256
"""Elements that share a scale in uint8 moments."""


def adamw_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None = None,
    *,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    first_element: int = 0,
    stochastic: bool = True,
) -> None:
    """Run one Adam or AdamW step in one pass over memory.

    States may be stored compactly, in host memory; each choice stands for itself:

    - The master may be split into its bf16 weight ``out``, which is then read and written, and int16
      remainders ``param``: bits of the master = (bits of the weight << 16) + remainder, modulo 2^32.
      Nothing is lost (a NaN becomes the quiet NaN of its sign); the weight is the master rounded to nearest,
      a tie away from zero.
    - Both moments may be bf16.
    - Both moments may be uint8 codes of the dynamic map that bitsandbytes uses, signed for ``exp_avg`` and
      unsigned for ``exp_avg_sq``, with the largest magnitude of each block of 256 elements in
      ``exp_avg_scale`` and ``exp_avg_sq_scale``. A block that gets an infinity or NaN is all NaN in the
      next step. A second moment above 0 is not rounded to 0.

    Args:
        param: fp32 master parameter, any shape, or int16 remainders; updated in place.
        grad: gradient, same number of elements, fp32, bf16 or fp16; only read.
        exp_avg: first moment: fp32, bf16 or uint8, updated in place.
        exp_avg_sq: second moment, in the dtype of ``exp_avg``; updated in place.
        out: if given, receives the new parameter as fp32, bf16 or fp16, rounded to nearest even. With int16
            ``param``: the bf16 weights, updated in place.
        exp_avg_scale: with uint8 moments, and only then: fp32, one element per started block of 256 elements.
        exp_avg_sq_scale: likewise.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the bias-corrected root of the second moment.
        weight_decay: decoupled decay (AdamW), or an L2 term added to the gradient (Adam).
        step: number of this step, from 1.
        grad_scale: the gradient is multiplied by this first: 1 / loss scale, times the clip factor.
        adamw_mode: AdamW if true, Adam otherwise.
        bias_correction: whether to correct the moments' bias.
        first_element: where the tensors start in a larger one that is stepped in several calls: the random
            numbers of an element depend on ``step`` and its place there. The pieces of uint8 moments must
            be whole blocks, except the last.
        stochastic: whether bf16 and uint8 moments are rounded up or down by chance, so that the expectation
            is the exact value (uint8: inside of a decade of the map); otherwise to the nearest.

    Raises:
        RuntimeError: a tensor has the wrong dtype, device, size or layout.
        ConfigError: ``PEFTDS_CPU_ISA`` names what this CPU lacks (raised as RuntimeError by torch).

    Source of the formula: see ``csrc/kernels/adam_math.h``.
    """
    torch.ops.peftds_ext.adamw_step_(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        out,
        exp_avg_scale=exp_avg_scale,
        exp_avg_sq_scale=exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        adamw_mode=adamw_mode,
        bias_correction=bias_correction,
        first_element=first_element,
        stochastic=stochastic,
    )
    _changed(param, exp_avg, exp_avg_sq, out, exp_avg_scale, exp_avg_sq_scale)


def squared_norm(input: Tensor) -> Tensor:
    """Return the sum of squares of ``input`` (fp32, bf16 or fp16) as an fp64 scalar tensor.

    The result is finite if and only if every element is finite, so it also detects Inf and NaN.

    Raises:
        RuntimeError: wrong dtype, or not contiguous.
    """
    with torch.no_grad():
        result: Tensor = torch.ops.peftds_ext.squared_norm(input)
    return result


def accumulate_(buffer: Tensor, grad: Tensor, add: bool) -> Tensor:
    """Copy ``grad`` into ``buffer``, or add it, and return the new buffer's sum of squares; one pass.

    For tensors in host memory only.

    Args:
        buffer: fp32, bf16 or fp16, any shape; written.
        grad: same number of elements, fp32, bf16 or fp16 (need not be the buffer's dtype); only read.
        add: whether to add to what the buffer holds (in fp32, rounded once) or to overwrite it.

    Returns:
        fp64 scalar, as :func:`squared_norm` of ``buffer`` gives it.

    Raises:
        RuntimeError: wrong dtype, device, size, or not contiguous.
    """
    result: Tensor = torch.ops.peftds_ext.accumulate_(buffer, grad, add)
    _changed(buffer)
    return result


def cast_into(input: Tensor, out: Tensor) -> None:
    """Convert ``input`` into ``out`` (fp32, bf16, fp16 in any pairing), rounding to nearest even.

    Raises:
        RuntimeError: wrong dtype, device, size, or not contiguous.
    """
    torch.ops.peftds_ext.cast_into(input, out)
    _changed(out)


def _changed(*tensors: Tensor | None) -> None:
    """Let autograd notice in-place changes, which an operator without an autograd kernel does not."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([t for t in tensors if t is not None])


# ---- fake versions: the checks and shapes, without the work ------------------------------------


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check_like(tensor: Tensor, name: str, first: Tensor, first_name: str) -> None:
    _check(tensor.device == first.device, f"{name} and {first_name} must be on the same device")
    _check(tensor.numel() == first.numel(), f"{name} must have as many elements as {first_name}")
    _check(tensor.is_contiguous(), f"{name} must be contiguous")


def _check_dtype(tensor: Tensor, name: str, allowed: tuple[torch.dtype, ...] = LOW_PRECISION) -> None:
    _check(tensor.dtype in allowed, f"{name} must be one of {allowed}, got {tensor.dtype}")


@torch.library.register_fake("peftds_ext::adamw_step_")  # type: ignore[untyped-decorator]
def _adamw_step_fake(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None = None,
    *,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    first_element: int = 0,
    stochastic: bool = True,
) -> None:
    _check_dtype(param, "param", (torch.float32, torch.int16))
    _check_dtype(grad, "grad")
    _check_dtype(exp_avg, "exp_avg", (torch.float32, torch.bfloat16, torch.uint8))
    _check(exp_avg_sq.dtype == exp_avg.dtype, "exp_avg and exp_avg_sq must have the same dtype")
    if param.dtype == torch.int16:
        _check(out is not None and out.dtype == torch.bfloat16, "param is int16, so out must be bfloat16")
    named = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if out is not None:
        _check_dtype(out, "out")
        named["out"] = out
    for name, tensor in named.items():
        _check_like(tensor, name, param, "param")
    for name, scale in (("exp_avg_scale", exp_avg_scale), ("exp_avg_sq_scale", exp_avg_sq_scale)):
        needed = exp_avg.dtype == torch.uint8
        _check((scale is not None) == needed, f"{name} must be given with uint8 moments, and only then")
        if scale is not None:
            _check_dtype(scale, name, (torch.float32,))
            _check(scale.device == param.device, f"{name} and param must be on the same device")
            _check(
                scale.numel() == -(-param.numel() // MOMENT_BLOCK), f"{name} must have one element per block"
            )
            _check(scale.is_contiguous(), f"{name} must be contiguous")
    _check(step >= 1, f"step counts from 1, got {step}")
    _check(first_element >= 0, f"first_element counts from 0, got {first_element}")


@torch.library.register_fake("peftds_ext::squared_norm")  # type: ignore[untyped-decorator]
def _squared_norm_fake(input: Tensor) -> Tensor:
    _check_dtype(input, "input")
    _check(input.is_contiguous(), "input must be contiguous")
    return input.new_empty((), dtype=torch.float64)


@torch.library.register_fake("peftds_ext::accumulate_")  # type: ignore[untyped-decorator]
def _accumulate_fake(buffer: Tensor, grad: Tensor, add: bool) -> Tensor:
    _check_dtype(grad, "grad")
    _check_dtype(buffer, "buffer")
    _check(grad.is_contiguous(), "grad must be contiguous")
    _check_like(buffer, "buffer", grad, "grad")
    return buffer.new_empty((), dtype=torch.float64)


@torch.library.register_fake("peftds_ext::cast_into")  # type: ignore[untyped-decorator]
def _cast_into_fake(input: Tensor, out: Tensor) -> None:
    _check_dtype(input, "input")
    _check_dtype(out, "out")
    _check(input.is_contiguous(), "input must be contiguous")
    _check_like(out, "out", input, "input")


# ---- references: what each operator means, in plain torch --------------------------------------


def adamw_step_reference_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None = None,
    *,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    adamw_mode: bool = True,
    bias_correction: bool = True,
) -> None:
    """Compute what :func:`adamw_step_` does, in the dtype of ``param`` (fp32, or fp64 for tests).

    Compact moments are rounded to nearest: there is no ``stochastic``.
    """
    master = param if out is None or param.dtype is not torch.int16 else _joined(out, param)
    m = _decoded(exp_avg, exp_avg_scale, signed=True).to(master.dtype)
    v = _decoded(exp_avg_sq, exp_avg_sq_scale, signed=False).to(master.dtype)
    g = grad.to(master.dtype).reshape(master.shape) * grad_scale
    if weight_decay and not adamw_mode:
        g = g + weight_decay * master
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    m.mul_(beta1).add_(g.reshape(m.shape), alpha=1.0 - beta1)
    v.mul_(beta2).addcmul_(g.reshape(v.shape), g.reshape(v.shape), value=1.0 - beta2)
    denominator = v.sqrt().div_(math.sqrt(correction2)).add_(eps)
    if weight_decay and adamw_mode:
        master.mul_(1.0 - lr * weight_decay)
    master.addcdiv_(m.reshape(master.shape), denominator.reshape(master.shape), value=-lr / correction1)
    _encode(m, exp_avg, exp_avg_scale, signed=True)
    _encode(v, exp_avg_sq, exp_avg_sq_scale, signed=False)
    if master is not param and out is not None:
        _split(master, out, param)
    elif out is not None:
        out.copy_(master.reshape(out.shape))


def _joined(weight: Tensor, remainder: Tensor) -> Tensor:
    bits = (weight.view(torch.int16).long() << 16) + remainder.long().reshape(weight.shape)
    return bits.to(torch.int32).view(torch.float32)


def _split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    bits = master.view(torch.int32).long()
    bits = torch.where(master.isnan(), torch.where(bits < 0, -0x400000, 0x7FC00000), bits)
    weight.view(torch.int16).copy_(((bits + 0x8000) >> 16).reshape(weight.shape))
    remainder.copy_(bits.reshape(remainder.shape))


def dynamic_map_reference(signed: bool) -> tuple[Tensor, Tensor]:
    """Return the 256 values of the dynamic map, ascending, and the 255 borders between them, in fp64.

    Every decade below 1 is cut into equal cells. Their middles are the values, beside 0 and 1.
    """
    edges = [torch.linspace(0.1, 1.0, 2 ** (i + (not signed)) + 1, dtype=torch.float64) for i in range(7)]
    scaled = [edge * 10.0 ** (i - 6) for i, edge in enumerate(edges)]
    one = torch.ones(1, dtype=torch.float64)
    values = torch.cat([*((edge[1:] + edge[:-1]) / 2 for edge in scaled), one])
    borders = torch.cat([values[:1] / 2, *(edge[1:] for edge in scaled)])
    borders[-1] = (values[-2] + values[-1]) / 2
    if not signed:
        return torch.cat([0 * one, values]), borders
    return torch.cat([-values[:-1].flip(0), 0 * one, values]), torch.cat([-borders[:-1].flip(0), borders])


def _blocks(values: Tensor) -> Tensor:
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % MOMENT_BLOCK)).reshape(-1, MOMENT_BLOCK)


def _decoded(stored: Tensor, scale: Tensor | None, signed: bool) -> Tensor:
    if scale is None:
        return stored
    values = dynamic_map_reference(signed)[0].to(scale)[_blocks(stored).long()] * scale.reshape(-1, 1)
    return values.flatten()[: stored.numel()].reshape(stored.shape)


def _encode(values: Tensor, stored: Tensor, scale: Tensor | None, signed: bool) -> None:
    if scale is None:
        stored.copy_(values)  # rounds to nearest even, or is the same tensor
        return
    blocks = _blocks(values)
    absmax = blocks.abs().amax(1)
    absmax = torch.where(absmax > 0, absmax.clamp(min=torch.finfo(scale.dtype).tiny), absmax)
    absmax = torch.where(absmax.isfinite(), absmax, math.nan)
    fractions = blocks / torch.where(absmax == 0, 1.0, absmax).reshape(-1, 1)
    codes = torch.bucketize(fractions.double(), dynamic_map_reference(signed)[1], right=True)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    scale.copy_(absmax.reshape(scale.shape))
    stored.copy_(codes.flatten()[: stored.numel()].reshape(stored.shape))


def squared_norm_reference(input: Tensor) -> Tensor:
    """Compute what :func:`squared_norm` does."""
    return input.double().square().sum()


def accumulate_reference_(buffer: Tensor, grad: Tensor, add: bool) -> Tensor:
    """Compute what :func:`accumulate_` does."""
    value = grad.float().reshape(buffer.shape)
    buffer.copy_(buffer.float() + value if add else value)
    return squared_norm_reference(buffer)


def cast_into_reference(input: Tensor, out: Tensor) -> None:
    """Compute what :func:`cast_into` does."""
    out.copy_(input.reshape(out.shape))
