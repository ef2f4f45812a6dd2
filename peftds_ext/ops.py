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


def adamw_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None = None,
    *,
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
    """Run one Adam or AdamW step in one pass over memory.

    Args:
        param: fp32 master parameter, any shape; updated in place.
        grad: gradient, same number of elements, fp32, bf16 or fp16; only read.
        exp_avg: fp32 first moment, updated in place.
        exp_avg_sq: fp32 second moment, updated in place.
        out: if given, receives the new parameter as fp32, bf16 or fp16, rounded to nearest even.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the bias-corrected root of the second moment.
        weight_decay: decoupled decay (AdamW), or an L2 term added to the gradient (Adam).
        step: number of this step, from 1.
        grad_scale: the gradient is multiplied by this first: 1 / loss scale, times the clip factor.
        adamw_mode: AdamW if true, Adam otherwise.
        bias_correction: whether to correct the moments' bias.

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
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        adamw_mode=adamw_mode,
        bias_correction=bias_correction,
    )
    _changed(param, exp_avg, exp_avg_sq, out)


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
    named = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if out is not None:
        named["out"] = out
    for name, tensor in named.items():
        _check_like(tensor, name, param, "param")
        _check_dtype(tensor, name, LOW_PRECISION if name in ("grad", "out") else (torch.float32,))
    _check(step >= 1, f"step counts from 1, got {step}")


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
    """Compute what :func:`adamw_step_` does, in the dtype of ``param`` (fp32, or fp64 for tests)."""
    g = grad.to(param.dtype).reshape(param.shape) * grad_scale
    if weight_decay and not adamw_mode:
        g = g + weight_decay * param
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    exp_avg.mul_(beta1).add_(g, alpha=1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(eps)
    if weight_decay and adamw_mode:
        param.mul_(1.0 - lr * weight_decay)
    param.addcdiv_(exp_avg, denominator, value=-lr / correction1)
    if out is not None:
        out.copy_(param.reshape(out.shape))


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
