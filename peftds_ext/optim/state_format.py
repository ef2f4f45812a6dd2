# SPDX-License-Identifier: Apache-2.0
"""The forms in which Adam's states are kept, and how the states of a run of elements lie in memory.

Bytes per element, the low-precision weight itself not counted: an fp32 master takes 4, a split one 2, and
none where the weight is the master; two moments take 8 in fp32, 4 in bf16, and 2.03 in int8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

Master = Literal["fp32", "split", "weight"]
Moments = Literal["fp32", "bf16", "int8"]

SCALE_BLOCK: Final = 256
"""Elements of an int8 moment that share a scale."""

_ALIGNMENT: Final = 64
_MASTER_DTYPES: Final = {"fp32": torch.float32, "split": torch.int16}
_MOMENT_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


@dataclass(frozen=True)
class StateFormat:
    """How masters and moments are kept."""

    master: Master
    """``"fp32"``; ``"split"``: the 16 bits that a bf16 weight lacks; ``"weight"``: nothing, since an fp32
    weight is its own master."""

    moments: Moments

    @property
    def needs_weights(self) -> bool:
        """Whether the master is not whole without the low-precision weights."""
        return self.master != "fp32"

    def arrays(self, numel: int) -> dict[str, tuple[torch.dtype, int]]:
        """Return dtype and elements of each array, in their order, for ``numel`` parameters."""
        found: dict[str, tuple[torch.dtype, int]] = {}
        if self.master in _MASTER_DTYPES:
            found["master"] = (_MASTER_DTYPES[self.master], numel)
        for name in ("exp_avg", "exp_avg_sq"):
            found[name] = (_MOMENT_DTYPES[self.moments], numel)
        if self.moments == "int8":
            for name in ("exp_avg_scale", "exp_avg_sq_scale"):
                found[name] = (torch.float32, math.ceil(numel / SCALE_BLOCK))
        return found

    def nbytes(self, numel: int) -> int:
        """Return the bytes that the arrays take one after another, each aligned."""
        return sum(_aligned(count * dtype.itemsize) for dtype, count in self.arrays(numel).values())

    def carve(self, memory: Tensor, numel: int) -> dict[str, Tensor]:
        """Return the arrays as views of ``memory``, bytes of :meth:`nbytes` or more."""
        found, offset = {}, 0
        for name, (dtype, count) in self.arrays(numel).items():
            nbytes = count * dtype.itemsize
            found[name] = memory[offset : offset + nbytes].view(dtype)
            offset += _aligned(nbytes)
        return found

    def __str__(self) -> str:
        masters = {"fp32": "fp32 masters", "split": "split masters", "weight": "the weights as masters"}
        return f"{masters[self.master]} and {self.moments} moments"


def slice_arrays(arrays: dict[str, Tensor], part: range) -> dict[str, Tensor]:
    """Return views of the arrays' elements of ``part``, which begins where a block of a scale does."""
    blocks = slice(part.start // SCALE_BLOCK, math.ceil(part.stop / SCALE_BLOCK))
    return {
        name: array[blocks] if name.endswith("_scale") else array[part.start : part.stop]
        for name, array in arrays.items()
    }


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
