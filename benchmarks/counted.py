# SPDX-License-Identifier: Apache-2.0
"""Bytes that this process moves to and from disks, beside the seconds of what moves them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import psutil  # type: ignore[import-untyped]
from interleave import Phases

READ, WRITTEN = "bytes read", "bytes written"
OUTSIDE = "bytes outside"
"""What moved since the last round: nothing, unless work goes on behind the back of the clock."""


def counted(phase: str, direction: str) -> str:
    """Name the bytes of ``direction`` that moved during ``phase``."""
    return f"{phase}: {direction}"


def moved() -> tuple[int, int]:
    """Return the bytes that all threads have had read from and written to disks, by the kernel's count.

    With direct I/O they are counted when a transfer starts. What the page cache serves or takes is missing.
    """
    counters = psutil.Process().io_counters()
    return int(counters.read_bytes), int(counters.write_bytes)


def counting(steps: Mapping[str, Callable[[], object]]) -> Callable[[], Phases]:
    """Return a function that does what that of :func:`interleave.timed` does, and counts bytes too."""
    last: tuple[int, int] | None = None

    def run() -> Phases:
        nonlocal last
        before = moved()
        phases: Phases = {OUTSIDE: float(sum(before) - sum(last or before))}
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            phases[name] = time.perf_counter() - start
            after = moved()
            phases[counted(name, READ)] = float(after[0] - before[0])
            phases[counted(name, WRITTEN)] = float(after[1] - before[1])
            before = after
        last = before
        return phases

    return run
