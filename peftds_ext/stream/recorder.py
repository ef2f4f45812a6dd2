# SPDX-License-Identifier: Apache-2.0
"""What streaming did in each step: the record that users read, and the spans of a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from peftds_ext import _native
from peftds_ext.observe.stats import StepStats, TierStats, union_length
from peftds_ext.observe.trace import Span, TraceWriter

if TYPE_CHECKING:
    from peftds_ext._native._core import Executor, StreamEvent
    from peftds_ext.stream.uploads import DeviceEvent, Uploads

LAYERS, WAITS, DECODER = "layers", "waits", "decoder"
COPIES, STALLS = "copies", "device waits"
"""Tracks of a trace: uses of layers, what the training thread waited for, the executor's own thread; copies
to a device, and what the device waited for. Those of reads, which overlap, are ``disk 0``, ``disk 1``, ..."""

Interval = tuple[int, int]
_WRITTEN_AT_ONCE: Final = 1000


class ProfilerRanges(Protocol):
    """Ranges that a profiler shows, which need not lie within each other, such as ``torch.cuda.nvtx``."""

    def range_start(self, msg: str) -> Any:
        """Begin a range; returns what ends it."""

    def range_end(self, range_id: Any) -> None:
        """End a range."""


class Recorder:
    """Collects what the executor did and when layers were in use. Used by the training thread alone."""

    def __init__(
        self, names: Sequence[str], trace: TraceWriter | None, profiler: ProfilerRanges | None = None
    ) -> None:
        """Record layers of these names; with ``trace`` also their spans, by ``time.monotonic_ns()``.

        ``profiler`` is shown the uses of layers as they are.
        """
        self._names, self._trace, self._profiler = names, trace, profiler
        self._ranges: dict[int, Any] = {}  # by layer in use: the profiler's
        self._began = time.monotonic_ns()
        self._in_use: dict[int, tuple[int, str]] = {}  # by layer: since when, and how
        self._spans: list[Span] = []
        self._free_from: list[int] = []  # by track of transfers
        self._uses = 0
        self._before: Mapping[str, int] = _counts(None, None)
        self.last: StepStats | None = None
        self.run = _step(0, 0, (), None, _counts(None, None), 0)
        self.steps = 0

    def begin(self, layer: int, how: Literal["forward", "backward"]) -> None:
        """A layer is used: its weights are there."""
        self._uses += 1
        if self._profiler is not None and layer not in self._ranges:
            self._ranges[layer] = self._profiler.range_start(f"{how} {self._names[layer]}")
        if self._trace is not None:
            self._in_use.setdefault(layer, (time.monotonic_ns(), how))

    def end(self, layer: int) -> None:
        """A layer's use is over."""
        if self._profiler is not None and layer in self._ranges:
            self._profiler.range_end(self._ranges.pop(layer))
        started = self._in_use.pop(layer, None)
        if started is not None:
            since, how = started
            self._spans.append(Span(LAYERS, f"{how} {self._names[layer]}", since, time.monotonic_ns()))
            if self._trace is not None and len(self._spans) >= _WRITTEN_AT_ONCE:  # inference ends no step
                self._trace.add(self._spans)
                self._spans.clear()

    def end_step(self, executor: Executor | None, uploads: Uploads | None, optimizer_began: int) -> None:
        """A step has ended, and the next one begins; the optimizer's part began at a time of this clock."""
        now = time.monotonic_ns()
        events = executor.drain() if executor is not None else []
        device_events = uploads.drain() if uploads is not None else None
        counts = _counts(executor, uploads)
        moved = {key: counts[key] - self._before[key] for key in counts}
        self.last = _step(self._began, now, events, device_events, moved, self._uses)
        self.run = _sum(self.run, self.last)
        self.steps += 1
        self._began, self._before, self._uses = now, counts, 0
        if self._trace is not None:
            step = Span(LAYERS, "optimizer step", optimizer_began, now)
            on_device = _device_spans(device_events or (), self._names)
            self._trace.add([*self._spans, step, *_spans(events, self._names, self._free_from), *on_device])
            self._spans.clear()

    def close(self) -> None:
        """End the trace. Idempotent."""
        if self._trace is not None:
            self._trace.close()


def _counts(executor: Executor | None, uploads: Uploads | None) -> dict[str, int]:
    """Return totals of layers that were ready, and waited for, and of bytes read and copied."""
    read = executor.counts() if executor is not None else None
    counts = {"ready": 0, "waited": 0, "read": read.bytes if read is not None else 0, "copied": 0}
    if uploads is not None:
        copies = uploads.counts
        counts |= {"ready": copies.ready, "waited": copies.demanded, "copied": copies.bytes}
    elif read is not None:
        counts |= {"ready": read.ready, "waited": read.waited + read.demanded}
    return counts


def _step(
    began: int,
    ended: int,
    events: Sequence[StreamEvent],
    device_events: Sequence[DeviceEvent] | None,
    moved: Mapping[str, int],
    uses: int,
) -> StepStats:
    kinds: Any = _native.core().StreamEventKind if events else None

    def within(event: StreamEvent | DeviceEvent) -> Interval:
        return max(began, event.start), min(ended, event.end)

    def on_host(kind: str) -> list[Interval]:
        return [within(event) for event in events if event.kind is getattr(kinds, kind)]

    waits, decoding = on_host("WAIT"), on_host("DECODE")
    stalls = None  # where there is no device, compute waits when the host does
    resident = max(0, uses - moved["ready"] - moved["waited"])
    tiers = {"disk": TierStats(bytes=moved["read"], seconds=union_length(on_host("READ")) / 1e9)}
    if device_events is not None:
        copies = [within(event) for event in device_events if event.kind == "copy"]
        stalls = [within(event) for event in device_events if event.kind == "stall"]
        tiers["copies"] = TierStats(bytes=moved["copied"], seconds=union_length(copies) / 1e9)
    return StepStats(
        seconds=(ended - began) / 1e9,
        compute_waited_seconds=union_length(waits if stalls is None else stalls) / 1e9,
        waited_for=_waited_for(stalls, waits, decoding),
        layers_used=resident + moved["ready"] + moved["waited"],
        layers_resident=resident,
        layers_ready=moved["ready"],
        layers_waited_for=moved["waited"],
        tiers=tiers,
    )


def _waited_for(
    stalls: Sequence[Interval] | None, waits: Sequence[Interval], decoding: Sequence[Interval]
) -> Literal["disk", "decode", "copies"]:
    """Return what compute waited for most of the time: for what the host waited for, or for copies."""
    if stalls is not None and 2 * _overlap(stalls, waits) <= union_length(stalls):
        return "copies"
    return "decode" if 2 * _overlap(waits, decoding) > union_length(waits) else "disk"


def _overlap(some: Sequence[Interval], others: Sequence[Interval]) -> int:
    return union_length(some) + union_length(others) - union_length([*some, *others])


def _sum(total: StepStats, step: StepStats) -> StepStats:
    """Add a step to those before it; what was waited for longer is what the sum waited for."""
    longer = max((total, step), key=lambda part: part.compute_waited_seconds)
    tiers = {}
    for name in {**total.tiers, **step.tiers}:
        parts = [part.tiers[name] for part in (total, step) if name in part.tiers]
        tiers[name] = TierStats(
            bytes=sum(part.bytes for part in parts), seconds=sum(part.seconds for part in parts)
        )
    return StepStats(
        seconds=total.seconds + step.seconds,
        compute_waited_seconds=total.compute_waited_seconds + step.compute_waited_seconds,
        waited_for=longer.waited_for,
        layers_used=total.layers_used + step.layers_used,
        layers_resident=total.layers_resident + step.layers_resident,
        layers_ready=total.layers_ready + step.layers_ready,
        layers_waited_for=total.layers_waited_for + step.layers_waited_for,
        tiers=tiers,
    )


def _device_spans(events: Sequence[DeviceEvent], names: Sequence[str]) -> Iterator[Span]:
    """Yield what a device did as spans."""
    for event in events:
        if event.kind == "copy":
            moved = {"bytes": event.bytes}
            yield Span(COPIES, f"copy {names[event.layer]}", event.start, event.end, moved)
        else:
            yield Span(STALLS, f"wait for {names[event.layer]}", event.start, event.end)


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
