# SPDX-License-Identifier: Apache-2.0
"""Traces as a viewer reads them: tracks, times, names."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from peftds_ext.observe.trace import Span, TraceWriter

Event = dict[str, Any]
STEP = [
    Span("disk", "read 1", 1_000_000_250, 1_000_900_000, {"bytes": 4096}),
    Span("compute", "step", 1_000_000_001, 1_002_000_004),
    Span("compute", "layer 0", 1_000_000_001, 1_001_000_002),
    Span("compute", "layer 1", 1_001_000_002, 1_002_000_004),
]


def written(path: Path, *batches: list[Span], **options: Any) -> list[Event]:
    writer = TraceWriter(path, **options)
    for batch in batches:
        writer.add(batch)
    writer.close()
    return events_of(writer.path)


def events_of(path: Path) -> list[Event]:
    events = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert isinstance(events, list)
    return events


def spans_of(events: list[Event]) -> dict[str, list[Event]]:
    """Events by track, in the order of the file; fails where a track's name is missing, late or doubled."""
    names: dict[int, str] = {}
    found: dict[str, list[Event]] = {}
    for event in events:
        if event["name"] == "thread_name":
            assert event["tid"] not in names
            assert event["args"]["name"] not in found
            names[event["tid"]] = event["args"]["name"]
            found[event["args"]["name"]] = []
        elif event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def nanoseconds(event: Event) -> tuple[int, int]:
    """Start and end; fails where they are not whole nanoseconds."""
    times = [event["ts"] * 1000, event["dur"] * 1000]
    start, duration = map(round, times)
    assert times == pytest.approx([start, duration], abs=1e-3)
    return start, start + duration


def assert_nested(events: list[Event]) -> None:
    """Fail unless each span, in the order of the file, is inside the open ones or after them."""
    open_ends: list[int] = []
    latest = 0
    for event in events:
        start, end = nanoseconds(event)
        assert start >= latest
        latest = start
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_spans_have_a_track_each_and_keep_their_nanoseconds(tmp_path: Path) -> None:
    tracks = spans_of(written(tmp_path / "t.json", STEP))
    assert {track: [event["name"] for event in events] for track, events in tracks.items()} == {
        "compute": ["step", "layer 0", "layer 1"],
        "disk": ["read 1"],
    }
    assert [nanoseconds(event) for event in tracks["compute"]] == [
        (0, 2_000_003),
        (0, 1_000_001),
        (1_000_001, 2_000_003),
    ]
    assert tracks["disk"][0]["ts"] == 0.249
    assert tracks["disk"][0]["dur"] == 899.75
    assert tracks["disk"][0]["args"] == {"bytes": 4096}
    for events in tracks.values():
        assert_nested(events)


def test_a_track_is_named_once_however_often_it_is_used(tmp_path: Path) -> None:
    later = [Span(track, "2", 2_000_000_000, 2_000_000_001) for track in ("disk", "copy")]
    events = written(tmp_path / "t.json", STEP, [], later)
    tracks = spans_of(events)
    assert list(tracks) == ["compute", "disk", "copy"]
    assert [nanoseconds(event) for event in tracks["disk"]][1] == (999_999_999, 1_000_000_000)
    order = [event for event in events if event["name"] == "thread_sort_index"]
    assert [event["args"]["sort_index"] for event in order] == [0, 1, 2]
    assert len({event["tid"] for event in order}) == 3


def test_a_month_after_the_origin_a_nanosecond_still_counts(tmp_path: Path) -> None:
    start = 30 * 24 * 3600 * 10**9 + 1
    (events,) = spans_of(
        written(tmp_path / "t.json", [Span("a", "b", start, start + 1)], origin_ns=0)
    ).values()
    assert round(events[0]["ts"] * 1000) == start
    assert events[0]["dur"] == 0.001


def test_the_origin_that_is_given_is_time_0(tmp_path: Path) -> None:
    tracks = spans_of(written(tmp_path / "t.json", STEP, origin_ns=1_000_000_000))
    assert nanoseconds(tracks["compute"][0]) == (1, 2_000_004)


def test_names_and_arguments_of_any_kind_stay_json(tmp_path: Path) -> None:
    arguments = {"rate": float("inf"), "loss": float("nan"), "share": 0.5, "path": 'a"\\\n\udc80é'}
    (events,) = spans_of(written(tmp_path / "t.json", [Span("Datenträger", "„a“", 0, 1, arguments)])).values()
    assert events[0]["name"] == "„a“"
    assert events[0]["args"] == {**arguments, "rate": "inf", "loss": "nan"}


def test_a_span_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'read' ends at 4 ns, before its start 5 ns"):
        Span("disk", "read", 5, 4)


def test_threads_do_not_mix_their_events(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")

    def work(track: str) -> None:
        for number in range(50):
            writer.add(
                [Span(track, str(number), number, number + 1), Span("shared", track, number, number + 1)]
            )

    threads = [threading.Thread(target=work, args=(f"track {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    tracks = spans_of(events_of(writer.path))
    assert len(tracks.pop("shared")) == 200
    assert sorted(tracks) == [f"track {i}" for i in range(4)]
    assert all([e["name"] for e in events] == [str(n) for n in range(50)] for events in tracks.values())
