# SPDX-License-Identifier: Apache-2.0
"""Hands samples that a race has taken to pytest-benchmark, through its documented timer option.

pytest-benchmark runs all rounds of one test before the next test, so it cannot interleave. The race
measures; each row then becomes one benchmark whose clock advances by the recorded seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

_now = 0.0


def recorded_clock() -> float:
    """Return the recorded time in seconds; give it to ``@pytest.mark.benchmark(timer=...)``."""
    return _now


def replay(seconds: Sequence[float]) -> Callable[[], None]:
    """Return a function whose n-th call advances :func:`recorded_clock` by ``seconds[n]``."""
    samples = itertools.cycle(seconds)

    def advance() -> None:
        global _now
        _now += next(samples)

    return advance
