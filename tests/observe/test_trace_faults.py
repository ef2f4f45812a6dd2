# SPDX-License-Identifier: Apache-2.0
"""Traces where something goes wrong: killed and forked processes, writes that fail."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from peftds_ext.observe.trace import Span, TraceWriter

SPAN = Span("disk", "read", 1000, 2000)
ROOMS = [0, 1, 2, 3, 50, 150]
"""Bytes that still fit when a write fails; the ending's bracket is the second."""


def spans_in(text: str) -> list[str]:
    """Names of the spans of a trace, in its order; fails if it is not JSON."""
    return [event["name"] for event in json.loads(text) if event["ph"] == "X"]


def test_a_forked_child_leaves_the_trace_alone(tmp_path: Path, run_python: Callable[..., str]) -> None:
    path = tmp_path / "t.json"
    run_python(f"""
import os
from pathlib import Path
from peftds_ext.observe.trace import Span, TraceWriter
writer = TraceWriter(Path({str(path)!r}))
child = os.fork()
writer.add([Span("a", "child" if child == 0 else "parent", 0, 1)])
if child == 0:
    writer.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
writer.add([Span("a", "parent", 1, 2)])
writer.close()
""")
    assert spans_in(path.read_text()) == ["parent", "parent"]


def test_the_trace_of_a_killed_process_needs_its_bracket_only(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    run_python(f"""
import os, signal
from pathlib import Path
from peftds_ext.observe.trace import Span, TraceWriter
for batches in (0, 1, 3):
    child = os.fork()
    if child == 0:
        writer = TraceWriter(Path({str(tmp_path)!r}, f"{{batches}}.json"))
        for number in range(batches):
            writer.add([Span("disk", f"read {{number}}", number, number + 1)])
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
""")
    for batches in (0, 1, 3):
        text = (tmp_path / f"{batches}.json").read_text()
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)
        assert spans_in(text.rstrip().rstrip(",") + "]") == [f"read {number}" for number in range(batches)]


def test_a_write_that_fails_ends_the_trace_with_one_warning(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    output = run_python(f"""
import json, logging, resource
from pathlib import Path
from peftds_ext.observe.trace import Span, TraceWriter

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
logging.getLogger("peftds_ext").addHandler(handler)
for room in {ROOMS}:
    writer = TraceWriter(Path({str(tmp_path)!r}, f"{{room}}.json"))
    writer.add([Span("disk", "first", 0, 1)])
    limit(writer.path.stat().st_size + room)
    for number in range(3):
        writer.add([Span("disk", "lost", 2, 3), Span("other", "lost", 2, 3)])
    limit(resource.RLIM_INFINITY)
    writer.add([Span("disk", "late", 4, 5)])
    writer.close()
print(json.dumps(lines))
""")
    lines = json.loads(output)
    assert [level for level, _ in lines] == ["WARNING"] * len(ROOMS)
    for room, (_, line) in zip(ROOMS, lines, strict=True):
        path = tmp_path / f"{room}.json"
        assert str(path) in line
        assert "ulimit -f" in line
        text = path.read_text()
        assert spans_in(text if room > 1 else text.rstrip().rstrip(",") + "]") == ["first"]


def test_a_full_disk_in_the_middle_is_told_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    writer.add([SPAN])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    writer.add([SPAN])
    monkeypatch.undo()
    writer.close()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("peftds_ext", "WARNING")
    assert "there is no room; free some space" in record.getMessage()
    assert spans_in(writer.path.read_text() + "]") == [SPAN.name]
