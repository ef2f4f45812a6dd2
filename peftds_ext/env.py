# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the package reads, in one place.

``PEFTDS_CPU_ISA``
    ``scalar``, ``avx2`` or ``avx512``: forces the instruction set of the CPU kernels. Read by the
    compiled core when the first kernel runs. A set that this CPU lacks is an error.

``PEFTDS_IO_FAULTS``
    Makes the storage engine's transfers go wrong, for tests of what happens then. Rules separated by
    semicolons, each ``OPERATION:FAULT@WHEN``: ``read``, ``write`` or ``any``; ``short``, ``end``, ``eio``,
    ``enospc``, ``eintr``, ``delay=MILLISECONDS`` or ``reorder``; the number of the transfer (``3``), from
    there on (``3+``) or a probability (``p0.1``). ``seed=N`` repeats the same draw.
"""

from __future__ import annotations

import os
from typing import Final

CPU_ISA: Final = "PEFTDS_CPU_ISA"
IO_FAULTS: Final = "PEFTDS_IO_FAULTS"


def forced_cpu_isa() -> str | None:
    """Return the instruction set that the user forces, or None when the choice is ours."""
    return os.environ.get(CPU_ISA) or None


def io_faults() -> str:
    """Return the faults that the storage engine is to make, or ""."""
    return os.environ.get(IO_FAULTS, "")
