# SPDX-License-Identifier: Apache-2.0
"""AdamW for parameters in host memory, stepped by the fused kernel; needs nothing but torch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peftds_ext import ops

logger = logging.getLogger("peftds_ext")

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Without the decorators, which would run step hooks and profiling a second time inside our own step.
_torch_step = inspect.unwrap(torch.optim.Adam.step)


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` whose CPU step is one pass over memory per parameter.

    Arguments, parameter groups and ``state_dict`` are those of ``torch.optim.AdamW``; state dicts can
    be exchanged both ways. The kernel steps contiguous fp32 parameters on the CPU whose gradients
    are dense fp32, bf16 or fp16. All others (on a GPU, in 16 bit, not contiguous, DTensor, ``amsgrad``,
    ``capturable``, ``differentiable``) are stepped by torch, and the log says so once per reason.

    Raises:
        ValueError: what ``torch.optim.AdamW`` refuses.
        NativeLoadError: the compiled core is missing.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; return the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # With `fused`, torch.amp.GradScaler sets these two and leaves its work to the step.
        grad_scale = getattr(self, "grad_scale", None)
        overflow = bool(getattr(self, "found_inf", False))
        for group in self.param_groups:
            rest = []
            for param in group["params"]:
                if param.grad is None:
                    continue
                reason = self._why_not_ours(param, group)
                if reason:
                    self._say_once(reason)
                    rest.append(param)
                elif not overflow:
                    if grad_scale is not None:
                        param.grad.div_(grad_scale)
                    self._step_one(param, group)
            if rest:
                self._step_by_torch({**group, "params": rest})
        return loss

    def _why_not_ours(self, param: Tensor, group: dict[str, Any]) -> str:
        for key in ("amsgrad", "capturable", "differentiable"):
            if group[key]:
                return f"{key} is set"
        grad = param.grad
        if param.device.type != "cpu" or param.dtype is not torch.float32:
            return f"a parameter is {param.dtype} on {param.device.type}"
        if grad is None or grad.layout is not torch.strided or grad.dtype not in _GRAD_DTYPES:
            return "a gradient is sparse or in a dtype that the kernel does not read"
        if not (_is_plain(param) and _is_plain(grad)):
            return f"a tensor subclass ({type(param).__name__}, gradient {type(grad).__name__})"
        if not (param.is_contiguous() and grad.is_contiguous()):
            return "a parameter or its gradient is not contiguous"
        state = self.state.get(param)
        if state and not all(_fits(state[key], param) for key in ("exp_avg", "exp_avg_sq")):
            return "loaded moments are not contiguous fp32 in host memory"
        return ""

    def _step_one(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        state["step"] += 1
        assert param.grad is not None
        ops.adamw_step_(
            param,
            param.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(state["step"]),
            grad_scale=-1.0 if group["maximize"] else 1.0,
        )

    def _step_by_torch(self, group: dict[str, Any]) -> None:
        groups, self.param_groups = self.param_groups, [group]
        try:
            with torch.set_grad_enabled(group["differentiable"]):
                _torch_step(self)
        finally:
            self.param_groups = groups

    def _say_once(self, reason: str) -> None:
        said: set[str] = self.__dict__.setdefault("_peftds_said", set())
        if reason not in said:
            said.add(reason)
            logger.info("torch's own AdamW steps some parameters: %s", reason)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it holds its elements itself, unlike DTensor and other wrappers."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _fits(moment: Tensor, param: Tensor) -> bool:
    return moment.dtype is torch.float32 and moment.device == param.device and moment.is_contiguous()
