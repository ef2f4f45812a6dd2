# SPDX-License-Identifier: Apache-2.0
"""The transfer plan: for each use of an order, what stays afterwards and how far reading may run ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peftds_ext.stream.residency import kept_after

_FARTHEST = 32
"""Uses that reading may run ahead at most. Farther helps no disk, and each costs a look."""


@dataclass(frozen=True)
class PlannedUse:
    """One use of a layer, in an order that repeats."""

    layer: int
    reads: bool
    """Whether the layer must have been read for it, since it was not kept after its last use."""
    kept: bool
    """Whether it stays until its next use."""
    reach: int
    """While the layer is in use, those of the next so many uses that must be read may be on their way."""
    staying: frozenset[int]
    """The other layers that are kept meanwhile."""


def plan_transfers(
    order: Sequence[int], sizes: Sequence[int], budget: int, read_sizes: Sequence[int] | None = None
) -> tuple[PlannedUse, ...]:
    """Plan an order that repeats; ``sizes`` are bytes by layer, 0 for one that need not be read.

    ``read_sizes`` are the bytes that a layer takes while it is read, if these are more.

    Beside the layer in use and the next one that must be read, what is kept and what is on its way take
    at most ``budget`` bytes at any time.
    """
    if not order:
        return ()
    kept = kept_after(order, sizes, budget)
    reads = _reads(order, sizes, kept)
    staying = list(_staying(order, kept))
    room = [budget - sum(sizes[layer] for layer in others) for others in staying]
    reach = _reaches(order, read_sizes or sizes, reads, room)
    return tuple(PlannedUse(*use) for use in zip(order, reads, kept, reach, staying, strict=True))


def _reads(order: Sequence[int], sizes: Sequence[int], kept: Sequence[bool]) -> list[bool]:
    stays = {layer: kept[use] for use, layer in enumerate(order)}  # after the end of the repetition before
    reads = []
    for use, layer in enumerate(order):
        reads.append(sizes[layer] > 0 and not stays[layer])
        stays[layer] = kept[use]
    return reads


def _staying(order: Sequence[int], kept: Sequence[bool]) -> Iterator[frozenset[int]]:
    """For each use, the other layers that are kept meanwhile."""
    staying = {layer for use, layer in enumerate(order) if kept[use] and layer not in order[use + 1 :]}
    for use, layer in enumerate(order):
        staying.discard(layer)
        yield frozenset(staying)
        if kept[use]:
            staying.add(layer)


def _reaches(
    order: Sequence[int], sizes: Sequence[int], reads: Sequence[bool], room: Sequence[int]
) -> list[int]:
    """Let each use reach as far as there is room at every use on the way."""
    length = len(order)
    farthest = min(length, _FARTHEST)
    to_read = [sizes[order[use % length]] * reads[use % length] for use in range(2 * length + 1)]
    read_before = [0, *itertools.accumulate(to_read)]
    next_read = _next_true([reads[use % length] for use in range(2 * length + 1)])

    def ahead(use: int, last: int) -> int:
        """Bytes on their way during a use if they reach up to another, without the next one that comes."""
        return max(0, read_before[last + 1] - read_before[min(next_read[use + 1] + 1, last + 1)])

    reaches = []
    for use in range(length):
        reach = min(max(1, next_read[use + 1] - use), length)
        while reach < farthest and all(
            ahead(on_the_way, use + reach + 1) <= room[on_the_way % length]
            for on_the_way in range(use, use + reach + 1)
        ):
            reach += 1
        reaches.append(reach)
    return reaches


def _next_true(flags: Sequence[bool]) -> list[int]:
    """For each place, the first one from there on that is true; the length if there is none."""
    found, place = [0] * len(flags), len(flags)
    for index in range(len(flags) - 1, -1, -1):
        place = index if flags[index] else place
        found[index] = place
    return found
