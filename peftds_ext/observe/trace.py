# SPDX-License-Identifier: Apache-2.0
"""A trace of a run, in the Trace Event Format of Chrome, which Perfetto reads (https://ui.perfetto.dev).

The file is an array of events, in the form whose closing bracket may be missing: the trace of a process that
was killed opens as it is. Other readers need ``text.rstrip().rstrip(",") + "]"`` for such a file. A trace
that was closed is plain JSON.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from peftds_ext.errors import ConfigError
from peftds_ext.observe.trace_file import TraceFile

_TRACKS_PER_RANK: Final = 1000  # keeps the threads of several ranks apart where their traces are merged


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from ``start_ns`` to ``end_ns``, both in nanoseconds of one clock.

    Two spans of one track are apart, or one holds the other: Perfetto leaves out those that overlap in part,
    so that work which overlaps belongs on several tracks. ``arguments`` are shown with the span.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    arguments: Mapping[str, int | float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns:
            raise ValueError(f"{self.name!r} ends at {self.end_ns} ns, before its start {self.start_ns} ns")


class TraceWriter:
    """Writes spans to a file as they come; what :meth:`add` has written is not lost with the process.

    Any thread may use it. A forked child shares the object, but writes nothing.
    """

    path: Path

    def __init__(
        self,
        path: Path,
        *,
        process: str = "peftds_ext",
        rank: int = 0,
        world_size: int = 1,
        origin_ns: int | None = None,
    ) -> None:
        """Make the file, in place of one that is there. With several ranks, ``t.json`` is ``t.rank0.json``.

        ``origin_ns`` is time 0 of the trace; None: the earliest start among the first spans that are added.
        Perfetto leaves out what starts before it.

        Raises:
            ConfigError: ``path`` is a folder, or not a path at all.
            StorageError: the file cannot be made or written to (StorageFullError: there is no room).
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} of {world_size}: give one from 0 to {world_size - 1}")
        if os.path.isdir(path):  # noqa: PTH112, since Path.is_dir raises where a folder may not be searched
            raise ConfigError(f"trace: {str(path)!r} is a folder; give the path of a file to write")
        if world_size > 1:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
            process = f"{process} rank {rank}"
        self.path = path
        self._process_id = rank + 1  # 0 is the idle process
        self._origin_ns = origin_ns
        self._threads: dict[str, int] = {}
        self._lock, self._owner = threading.Lock(), os.getpid()
        names = ",\n".join(self._names("process", 0, process, rank))
        self._file = TraceFile(path, header=f"[\n{names}", ending="\n]\n")

    def add(self, spans: Iterable[Span]) -> None:
        """Write ``spans``. Does nothing after :meth:`close`, or once a write has failed.

        A write that fails is told in the log and not raised, so that training goes on without its trace.
        """
        # Of two spans that start together, Perfetto takes the first one to hold the other.
        ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
        if not ordered or os.getpid() != self._owner:
            return
        with self._lock:
            if self._origin_ns is None:
                self._origin_ns = ordered[0].start_ns
            threads = dict(self._threads)
            events = [event for span in ordered for event in self._events(span, threads, self._origin_ns)]
            self._file.append("".join(f",\n{event}" for event in events))
            self._threads = threads

    def close(self) -> None:
        """End the file, which is plain JSON from then on. Idempotent."""
        if os.getpid() == self._owner:
            with self._lock:
                self._file.close()

    def _events(self, span: Span, threads: dict[str, int], origin_ns: int) -> Iterator[str]:
        """The event of a span, and before it those that name its track if it is not in ``threads`` yet."""
        if span.track not in threads:
            index = len(threads)
            threads[span.track] = self._process_id * _TRACKS_PER_RANK + index
            yield from self._names("thread", threads[span.track], span.track, index)
        yield json.dumps(
            {
                "ph": "X",
                "pid": self._process_id,
                "tid": threads[span.track],
                "name": span.name,
                "ts": (span.start_ns - origin_ns) / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {key: _plain(value) for key, value in span.arguments.items()},
            }
        )

    def _names(self, kind: str, thread: int, name: str, position: int) -> Iterator[str]:
        """The events that name a process or a thread, and say where it is shown among the others."""
        for suffix, arguments in (("name", {"name": name}), ("sort_index", {"sort_index": position})):
            event = {"ph": "M", "pid": self._process_id, "tid": thread, "name": f"{kind}_{suffix}"}
            yield json.dumps({**event, "args": arguments})


def _plain(value: int | float | str) -> int | float | str:
    """Return what JSON has a form for: infinity and NaN become words."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
