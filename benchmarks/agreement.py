# SPDX-License-Identifier: Apache-2.0
"""Checks that the contenders did the same work, so that a ratio compares like with like."""

from __future__ import annotations

import torch
from torch import Tensor


def check_agreement(
    name: str, result: Tensor, reference: Tensor, start: Tensor, *, tolerance: float
) -> float:
    """Compare two results of training from ``start``; return their distance.

    The distance is ``|result - reference| / |reference - start|`` (2-norms, taken in fp64): relative to
    the way that was gone, not to the size of the parameters, which would hide an optimizer that stands
    still.

    Raises:
        ArithmeticError: ``reference`` has not moved, or the distance is above ``tolerance`` or not finite.
    """
    moved = float((reference.double() - start.double()).norm())
    if not moved > 0.0:
        raise ArithmeticError(f"{name}: the reference has not moved from its start; nothing was trained")
    distance = float((result.double() - reference.double()).norm()) / moved
    if not distance <= tolerance:
        raise ArithmeticError(
            f"{name}: differs from the reference by {distance:.3e} of the way gone, allowed {tolerance:.0e}; "
            "the contenders did not do the same work, so their times must not be compared"
        )
    return distance


def check_equal(name: str, result: Tensor, expected: Tensor) -> None:
    """Compare two tensors bit by bit, up to the sign of zero.

    Raises:
        ArithmeticError: they differ.
    """
    if not torch.equal(result, expected):
        count = int((result != expected).sum())
        raise ArithmeticError(f"{name}: {count} of {result.numel()} elements are not what they must be")
