# SPDX-License-Identifier: Apache-2.0
"""Parameters that have no elements while they are not needed."""

from __future__ import annotations

import torch
from torch import nn

_SHAPE = "peftds_shape"
"""The attribute of an emptied parameter that tells its shape."""


def empty(parameter: nn.Parameter) -> None:
    """Let a parameter go of its elements, unless it has."""
    if is_empty(parameter):
        return
    setattr(parameter, _SHAPE, parameter.shape)
    with torch.inference_mode(False):  # training comes after inference, and wants ordinary tensors
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def is_empty(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter has no elements now."""
    return parameter.numel() == 0


def shape_of(parameter: nn.Parameter) -> torch.Size:
    """Return a parameter's shape, also while it is empty."""
    shape: torch.Size | None = getattr(parameter, _SHAPE, None) if is_empty(parameter) else None
    return parameter.shape if shape is None else shape
