# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the package reads, in one place.

``PEFTDS_CPU_ISA``
    ``scalar``, ``avx2`` or ``avx512``: forces the instruction set of the CPU kernels. Read by the
    compiled core when the first kernel runs. A set that this CPU lacks is an error.
"""

from __future__ import annotations

import os
from typing import Final

CPU_ISA: Final = "PEFTDS_CPU_ISA"


def forced_cpu_isa() -> str | None:
    """Return the instruction set that the user forces, or None when the choice is ours."""
    return os.environ.get(CPU_ISA) or None
