# SPDX-License-Identifier: Apache-2.0
"""Linear modules whose graph holds no memory of their frozen weight from forward to backward.

torch saves ``weight.t()`` for the gradient of the input, and with the view the bytes below it. Here the
graph keeps how the view lies in the parameter, and the backward pass takes it of what the parameter is
then. The operators are torch's own in both passes, so that results are its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def hold_no_weights(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    """Change the linear modules among some, as instances; returns those for :func:`restore`.

    One whose ``forward`` is not its class's own is left as it is.
    """
    changed = []
    for module in modules:
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
            changed.append(module)
    return changed


def restore(modules: Iterable[nn.Linear]) -> None:
    """Take off what :func:`hold_no_weights` put on; what somebody else put there since stays."""
    for module in modules:
        if getattr(vars(module).get("forward"), "__func__", None) is _forward:
            del module.forward


@dataclass(frozen=True, slots=True)
class _View:
    """How a view lies in the parameter that it is of."""

    parameter: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _forward(module: nn.Linear, input: Tensor) -> Tensor:  # named as torch's, for callers by keyword
    weight: Tensor = module.weight
    if weight.requires_grad or not torch.is_grad_enabled():
        return nn.Linear.forward(module, input)
    # The input is needed for no gradient, so that nothing but the weight is saved and comes here.
    with saved_tensors_hooks(functools.partial(_pack, weight), _unpack):
        return nn.Linear.forward(module, input)


def _pack(weight: Tensor, saved: Tensor) -> Tensor | _View:
    if saved.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        return saved  # a copy of the weight, such as autocast makes
    return _View(weight, saved.size(), saved.stride(), int(saved.storage_offset() - weight.storage_offset()))


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    weight = packed.parameter.detach()
    return weight.as_strided(packed.size, packed.stride, weight.storage_offset() + packed.offset)
