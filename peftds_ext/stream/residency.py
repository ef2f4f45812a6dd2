# SPDX-License-Identifier: Apache-2.0
"""Which layers stay in memory between their uses, within a budget."""

from __future__ import annotations

from collections.abc import Sequence


def kept_after(order: Sequence[int], sizes: Sequence[int], budget: int) -> tuple[bool, ...]:
    """Tell for each use of an order that repeats whether its layer is kept until its next use.

    ``sizes`` are bytes by layer. While a layer is in use, the others that are kept take at most ``budget``
    bytes; a layer that is used twice in a row, as at the turn from forward to backward, stays in any case.
    Those whose next use is nearest are kept first (after Belady, "A study of replacement algorithms for a
    virtual-storage computer", 1966). For the sweeps of training over layers of one size no other choice reads
    less; for other orders it is a greedy choice.
    """
    length = len(order)
    if not length:
        return ()
    gaps = _distances_to_next_use(order)
    kept = [False] * length
    taken = [0] * length  # bytes of the others that are kept during each use
    for use in sorted(range(length), key=lambda use: (gaps[use], use)):
        size = sizes[order[use]]
        meanwhile = [(use + step) % length for step in range(1, gaps[use])]
        if all(taken[other] + size <= budget for other in meanwhile):
            kept[use] = True
            for other in meanwhile:
                taken[other] += size
    return tuple(kept)


def _distances_to_next_use(order: Sequence[int]) -> list[int]:
    """Uses from each one to the next of the same layer, round the end to the beginning."""
    length = len(order)
    gaps = [0] * length
    latest: dict[int, int] = {}
    for use in range(2 * length - 1, -1, -1):
        layer = order[use % length]
        if use < length:
            gaps[use] = latest[layer] - use
        latest[layer] = use
    return gaps
