# SPDX-License-Identifier: Apache-2.0
"""What the memory can do, measured with torch: the rates that all others are compared with."""

from __future__ import annotations

import torch
from interleave import Contender, timed


def run(elements: int) -> Contender:
    """Return a contender with two phases over fp32 tensors.

    ``copy``: 4 B read and 4 B written per element; what the cache fetches before it writes is not counted,
    so memory moves up to 12 B. ``scale``: 4 B read and 4 B written in place, nothing fetched in vain, as in
    an optimizer step.
    """
    source, target = torch.ones(elements), torch.zeros(elements)
    return Contender(
        "bandwidth", timed({"copy": lambda: target.copy_(source), "scale": lambda: target.mul_(1.0)})
    )
