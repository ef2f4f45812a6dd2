# SPDX-License-Identifier: Apache-2.0
"""The AdamW problem that all contenders of ``bench_adamw.py`` solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from interleave import Contender
from torch import Tensor

LR: Final = 1e-3
BETAS: Final = (0.9, 0.999)
EPS: Final = 1e-8
WEIGHT_DECAY: Final = 0.01
GRAD_SCALE: Final = 1024.0
"""Factor on the bf16 gradients, undone by the step; a power of two, so that nothing is rounded."""


@dataclass(frozen=True)
class Problem:
    """``start``: fp32 parameters; ``grad``: bf16 gradients, unscaled; both of one dimension."""

    start: Tensor
    grad: Tensor

    @classmethod
    def make(cls, elements: int) -> Problem:
        """Return a fixed problem of ``elements`` elements."""
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(elements, generator=generator)
        grad = torch.randn(elements, generator=generator).mul_(1e-2).bfloat16()
        return cls(start, grad)


@dataclass(frozen=True)
class Entry:
    """A contender with what it leaves: fp32 ``master`` and, where it writes one, the bf16 ``weight``."""

    contender: Contender
    master: Tensor
    weight: Tensor | None = None
