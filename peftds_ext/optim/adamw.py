# SPDX-License-Identifier: Apache-2.0
"""AdamW for parameters in host memory, stepped by the fused kernel; needs nothing but torch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from peftds_ext import ops
from peftds_ext.optim.formats import dequantize_moment, quantize_moment

logger = logging.getLogger("peftds_ext")

States = Literal["fp32", "bf16", "int8"]
Rounding = Literal["stochastic", "nearest"]

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether they may be negative."""
_DTYPES: dict[States, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Without the decorators, which would run step hooks and profiling a second time inside our own step.
_torch_step = inspect.unwrap(torch.optim.Adam.step)


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` whose CPU step is one pass over memory per parameter.

    Arguments, parameter groups and ``state_dict`` are those of ``torch.optim.AdamW``; with fp32 ``states``
    the state dicts can be exchanged both ways. The kernel steps contiguous fp32 parameters on the CPU whose
    gradients are dense fp32, bf16 or fp16. All others (on a GPU, in 16 bit, not contiguous, DTensor,
    ``amsgrad``, ``capturable``, ``differentiable``) are stepped by torch; the log says so once per reason.

    With ``states`` the moments of parameters that the kernel steps take less memory; they are computed
    in fp32 all the same. Parameters that torch steps have fp32 moments. ``load_state_dict`` takes a state
    dict of any form: one of the same form as it is, others rounded to nearest, which the log says. To go on
    with ``torch.optim.AdamW`` from int8 moments, load them into a ``FusedAdamW`` with fp32 states, and
    its state dict into torch's.

    Args:
        params: as ``torch.optim.AdamW`` takes them; so are all arguments but the next two.
        states: form of the two moments: ``"fp32"``, 8 bytes for each element of a parameter; ``"bf16"``, 4;
            or ``"int8"``, 2 and 8 for each 256 elements (one scale per moment, ``exp_avg_scale`` and
            ``exp_avg_sq_scale`` in the state).
        rounding: of moments that are not fp32. ``"stochastic"`` is right on average, and the same in each
            run. With ``"nearest"`` changes that are small beside a moment are lost, however many there are.

    Raises:
        ValueError: what ``torch.optim.AdamW`` refuses, or ``states`` or ``rounding`` is not one of the above.
        NativeLoadError: the compiled core is missing.
    """

    states: States = "fp32"
    rounding: Rounding = "stochastic"
    """Here as well as in the constructor, for pickles that lack them."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        states: States = "fp32",
        rounding: Rounding = "stochastic",
        **kwargs: Any,
    ) -> None:
        _check_choice("states", states, get_args(States))
        _check_choice("rounding", rounding, get_args(Rounding))
        super().__init__(params, *args, **kwargs)
        self.states = states
        self.rounding = rounding

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
        first = 0
        for group in self.param_groups:
            rest = []
            for param in group["params"]:
                # Each parameter has random numbers of its own, whichever of them have a gradient.
                first, first_element = first + param.numel(), first
                if param.grad is None:
                    continue
                reason = self._why_not_ours(param, group)
                if reason:
                    self._say_once(f"torch's own AdamW steps some parameters: {reason}")
                    rest.append(param)
                elif not overflow:
                    if grad_scale is not None:
                        param.grad.div_(grad_scale)
                    self._step_one(param, group, first_element)
            if rest:
                self._step_by_torch({**group, "params": rest})
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, here or in torch's AdamW, whatever form its moments have."""
        hook = self.register_load_state_dict_pre_hook(_keep_moments)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "states": self.states, "rounding": self.rounding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            for param in group["params"]:
                self._take_loaded(param, group)

    def _take_loaded(self, param: Tensor, group: dict[str, Any]) -> None:
        """Bring moments that are being loaded into the form that the parameter's step reads."""
        state = self.state.get(param, {})
        loaded = {key: value.moment for key, value in state.items() if isinstance(value, _Kept)}
        if not loaded:
            return
        state.update(loaded)
        if _why_not_ours(param, group):
            if _states_of(state) == "int8":
                self._bring_into(state, "fp32")
            dtype = param.dtype if param.is_floating_point() else None
            state.update({key: state[key].to(device=param.device, dtype=dtype) for key in _MOMENTS})
        else:
            state.update({key: value.to(param.device) for key, value in loaded.items()})
            self._bring_into(state, self.states)

    def _bring_into(self, state: dict[str, Any], states: States) -> None:
        found = _states_of(state)
        if found != states:
            self._say_once(f"moments are converted from {found} to {states}, rounded to nearest")
            _convert(state, states)

    def _why_not_ours(self, param: Tensor, group: dict[str, Any]) -> str:
        grad = param.grad
        if reason := _why_not_ours(param, group):
            return reason
        if grad is None or grad.layout is not torch.strided or grad.dtype not in _GRAD_DTYPES:
            return "a gradient is sparse or in a dtype that the kernel does not read"
        if not _is_plain(grad):
            return f"a gradient is a tensor subclass ({type(grad).__name__})"
        if not grad.is_contiguous():
            return "a gradient is not contiguous"
        state = self.state.get(param)
        if state and not all(_fits(state[key], param) for key in _MOMENTS):
            return "loaded moments are not contiguous fp32, bf16 or int8 in host memory"
        return ""

    def _step_one(self, param: Tensor, group: dict[str, Any], first_element: int) -> None:
        state = self.state[param]
        if state:
            self._bring_into(state, self.states)
        else:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(_zero_moments(param, self.states))
        state["step"] += 1
        assert param.grad is not None
        ops.adamw_step_(
            param,
            param.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            exp_avg_scale=state.get("exp_avg_scale"),
            exp_avg_sq_scale=state.get("exp_avg_sq_scale"),
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(state["step"]),
            grad_scale=-1.0 if group["maximize"] else 1.0,
            first_element=first_element,
            stochastic=self.rounding == "stochastic",
        )

    def _step_by_torch(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if (state := self.state.get(param)) and param.dtype is torch.float32:
                self._bring_into(state, "fp32")
        groups, self.param_groups = self.param_groups, [group]
        try:
            with torch.set_grad_enabled(group["differentiable"]):
                _torch_step(self)
        finally:
            self.param_groups = groups

    def _say_once(self, message: str) -> None:
        said: set[str] = self.__dict__.setdefault("_peftds_said", set())
        if message not in said:
            said.add(message)
            logger.info(message)


@dataclass(frozen=True)
class _Kept:
    """A moment that torch is not to cast to the parameter's dtype while it loads a state dict."""

    moment: Tensor


def _is_plain(tensor: Tensor) -> bool:
    """Whether it holds its elements itself, unlike DTensor and other wrappers."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _fits(moment: Tensor, param: Tensor) -> bool:
    known = moment.dtype in _DTYPES.values()
    return known and moment.device == param.device and moment.is_contiguous()


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}")


def _why_not_ours(param: Tensor, group: dict[str, Any]) -> str:
    """Tell what excludes the parameter from the kernel, whatever its gradient is; "" if nothing does."""
    for key in ("amsgrad", "capturable", "differentiable"):
        if group[key]:
            return f"{key} is set"
    if param.device.type != "cpu" or param.dtype is not torch.float32:
        return f"a parameter is {param.dtype} on {param.device.type}"
    if not _is_plain(param):
        return f"a parameter is a tensor subclass ({type(param).__name__})"
    return "" if param.is_contiguous() else "a parameter is not contiguous"


def _keep_moments(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hide the parameters' moments and scales from torch's cast."""
    keys = {*_MOMENTS, *map(_scale_key, _MOMENTS)}
    numbers = {number for group in state_dict["param_groups"] for number in group["params"]}

    def hidden(number: Any, entry: Any) -> Any:
        if number not in numbers or not entry.keys() >= _MOMENTS.keys():
            return entry
        if entry["exp_avg"].dtype is torch.uint8 and not entry.keys() >= keys:
            raise ValueError(
                "the state dict has int8 moments without their scales: exp_avg_scale, exp_avg_sq_scale"
            )
        return {key: _Kept(value) if key in keys else value for key, value in entry.items()}

    return {
        **state_dict,
        "state": {number: hidden(number, entry) for number, entry in state_dict["state"].items()},
    }


def _scale_key(moment: str) -> str:
    return f"{moment}_scale"


def _states_of(state: dict[str, Any]) -> States:
    dtype = state["exp_avg"].dtype
    return next((states for states in _DTYPES if _DTYPES[states] is dtype), "fp32")


def _zero_moments(param: Tensor, states: States) -> dict[str, Tensor]:
    moments = {key: torch.zeros_like(param, dtype=_DTYPES[states]) for key in _MOMENTS}
    if states == "int8":  # where a scale is 0, all codes stand for 0
        blocks = -(-param.numel() // ops.MOMENT_BLOCK)
        moments.update({_scale_key(key): param.new_zeros(blocks) for key in _MOMENTS})
    return moments


@torch.no_grad()
def _convert(state: dict[str, Any], states: States) -> None:
    """Store the moments in another form, rounded to nearest."""
    found = _states_of(state)
    for key, signed in _MOMENTS.items():
        moment = state[key]
        if found == "int8":
            scale = state.pop(_scale_key(key))
            moment = dequantize_moment(moment.reshape(-1), scale, signed).view(moment.shape)
        if states == "int8":
            codes, state[_scale_key(key)] = quantize_moment(moment.float().reshape(-1), signed)
            state[key] = codes.view(moment.shape)
        else:
            state[key] = moment.to(_DTYPES[states])
