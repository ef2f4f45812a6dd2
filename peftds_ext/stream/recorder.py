# SPDX-License-Identifier: Apache-2.0
"""What streaming did in each step: the record that users read, and the spans of a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from peftds_ext import _native
from peftds_ext.observe.stats import StepStats, TierStats, union_length
from peftds_ext.observe.trace import Span, TraceWriter

if TYPE_CHECKING:
    from peftds_ext._native._core import Executor, StreamEvent

LAYERS, WAITS, DECODER = "layers", "waits", "decoder"
"""Tracks of a trace: uses of layers, what the training thread waited for, the executor's own thread. Those of
transfers, which overlap, are ``disk 0``, ``disk 1``, ..."""

Interval = tuple[int, int]
_WRITTEN_AT_ONCE: Final = 1000


class Recorder:
    """Collects what the executor did and when layers were in use. Used by the training thread alone."""

    def __init__(self, names: Sequence[str], trace: TraceWriter | None) -> None:
        """Record layers of these names; with ``trace`` also their spans, by ``time.monotonic_ns()``."""
        self._names, self._trace = names, trace
        self._began = time.monotonic_ns()
        self._in_use: dict[int, tuple[int, str]] = {}  # by layer: since when, and how
        self._spans: list[Span] = []
        self._free_from: list[int] = []  # by track of transfers
        self._uses = 0
        self._before: Mapping[str, int] = _counts(None)
        self.last: StepStats | None = None
        self.run = _step(0, 0, (), _counts(None), 0)
        self.steps = 0

    def begin(self, layer: int, how: Literal["forward", "backward"]) -> None:
        """A layer is used: its weights are there."""
        self._uses += 1
        if self._trace is not None:
            self._in_use.setdefault(layer, (time.monotonic_ns(), how))

    def end(self, layer: int) -> None:
        """A layer's use is over."""
        started = self._in_use.pop(layer, None)
        if started is not None:
            since, how = started
            self._spans.append(Span(LAYERS, f"{how} {self._names[layer]}", since, time.monotonic_ns()))
            if self._trace is not None and len(self._spans) >= _WRITTEN_AT_ONCE:  # inference ends no step
                self._trace.add(self._spans)
                self._spans.clear()

    def end_step(self, executor: Executor | None, optimizer_began: int) -> None:
        """A step has ended, and the next one begins; the optimizer's part began at a time of this clock."""
        now = time.monotonic_ns()
        events = executor.drain() if executor is not None else []
        counts = _counts(executor)
        moved = {key: counts[key] - self._before[key] for key in counts}
        self.last = _step(self._began, now, events, moved, self._uses)
        self.run = _sum(self.run, self.last)
        self.steps += 1
        self._began, self._before, self._uses = now, counts, 0
        if self._trace is not None:
            step = Span(LAYERS, "optimizer step", optimizer_began, now)
            self._trace.add([*self._spans, step, *_spans(events, self._names, self._free_from)])
            self._spans.clear()

    def close(self) -> None:
        """End the trace. Idempotent."""
        if self._trace is not None:
            self._trace.close()


def _counts(executor: Executor | None) -> dict[str, int]:
    """Return totals of layers that were ready, and waited for, and of bytes read."""
    if executor is None:
        return {"ready": 0, "waited": 0, "bytes": 0}
    counts = executor.counts()
    return {"ready": counts.ready, "waited": counts.waited + counts.demanded, "bytes": counts.bytes}


def _step(
    began: int, ended: int, events: Sequence[StreamEvent], moved: Mapping[str, int], uses: int
) -> StepStats:
    kinds = _native.core().StreamEventKind if events else None

    def intervals(kind: str) -> list[Interval]:
        found = [event for event in events if event.kind is getattr(kinds, kind)]
        return [(max(began, event.start), min(ended, event.end)) for event in found]

    waits, decoding = intervals("WAIT"), intervals("DECODE")
    waited = union_length(waits)
    for_decoding = waited + union_length(decoding) - union_length([*waits, *decoding])
    resident = max(0, uses - moved["ready"] - moved["waited"])
    return StepStats(
        seconds=(ended - began) / 1e9,
        compute_waited_seconds=waited / 1e9,
        waited_for="decode" if 2 * for_decoding > waited else "disk",
        layers_used=resident + moved["ready"] + moved["waited"],
        layers_resident=resident,
        layers_ready=moved["ready"],
        layers_waited_for=moved["waited"],
        tiers={"disk": TierStats(bytes=moved["bytes"], seconds=union_length(intervals("READ")) / 1e9)},
    )


def _sum(total: StepStats, step: StepStats) -> StepStats:
    """Add a step to those before it; what was waited for longer is what the sum waited for."""
    disk, more = total.tiers["disk"], step.tiers["disk"]
    longer = max((total, step), key=lambda part: part.compute_waited_seconds)
    return StepStats(
        seconds=total.seconds + step.seconds,
        compute_waited_seconds=total.compute_waited_seconds + step.compute_waited_seconds,
        waited_for=longer.waited_for,
        layers_used=total.layers_used + step.layers_used,
        layers_resident=total.layers_resident + step.layers_resident,
        layers_ready=total.layers_ready + step.layers_ready,
        layers_waited_for=total.layers_waited_for + step.layers_waited_for,
        tiers={"disk": TierStats(bytes=disk.bytes + more.bytes, seconds=disk.seconds + more.seconds)},
    )


def _spans(events: Sequence[StreamEvent], names: Sequence[str], free_from: list[int]) -> Iterator[Span]:
    """Yield the executor's events as spans; transfers that overlap are on tracks of their own.

    ``free_from`` is when each of these tracks is free, and goes on from one call to the next.
    """
    kinds: Any = _native.core().StreamEventKind
    for event in sorted(events, key=lambda event: event.start):
        name, moved = names[event.layer], {"bytes": event.bytes}
        if event.kind is kinds.WAIT:
            yield Span(WAITS, f"wait for {name}", event.start, event.end)
        elif event.kind is kinds.DECODE:
            yield Span(
                DECODER if event.background else WAITS, f"decode {name}", event.start, event.end, moved
            )
        else:
            track = next((t for t, free in enumerate(free_from) if free <= event.start), len(free_from))
            free_from[track:] = [event.end, *free_from[track + 1 :]]
            yield Span(f"disk {track}", f"read {name}", event.start, event.end, moved)
