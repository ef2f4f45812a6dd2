# SPDX-License-Identifier: Apache-2.0
"""Where a trace is written: one file for each rank, what it replaces, and paths that cannot be written."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peftds_ext.errors import ConfigError, StorageError, StorageFullError
from peftds_ext.observe.trace import Span, TraceWriter

SPAN = Span("disk", "read", 1000, 2000)


def written(path: Path, spans: list[Span] | None = None, **options: Any) -> list[dict[str, Any]]:
    writer = TraceWriter(path, **options)
    writer.add([SPAN] if spans is None else spans)
    writer.close()
    events = json.loads(writer.path.read_text())
    assert isinstance(events, list)
    return events


def test_each_of_several_ranks_has_its_own_file_process_and_threads(tmp_path: Path) -> None:
    ranks = [written(tmp_path / "t.json", rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.rank0.json", "t.rank1.json"]
    assert [events[0]["args"]["name"] for events in ranks] == ["peftds_ext rank 0", "peftds_ext rank 1"]
    for key in ("pid", "tid"):
        first, second = ({event[key] for event in events if event["ph"] == "X"} for events in ranks)
        assert len(first) == len(second) == 1
        assert first != second


def test_one_rank_has_the_file_and_the_name_that_are_given(tmp_path: Path) -> None:
    assert written(tmp_path / "t.json", process="mine")[0]["args"]["name"] == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        TraceWriter(tmp_path / "t.json", rank=2, world_size=2)


def test_closing_twice_and_adding_afterwards_changes_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.json")
    writer.add([SPAN])
    writer.close()
    before = writer.path.read_bytes()
    writer.close()
    writer.add([SPAN])
    assert writer.path.read_bytes() == before


def test_a_trace_without_spans_is_valid_and_replaces_a_longer_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("x" * 10_000)
    assert [event["ph"] for event in written(path, [])] == ["M", "M"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_from_the_start_is_an_error() -> None:
    with pytest.raises(StorageFullError, match="there is no room") as caught:
        TraceWriter(Path("/dev/full"))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")


def test_a_missing_folder_and_a_file_in_its_place_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, words in (("missing", "does not exist; make it"), ("file", "is not a folder")):
        with pytest.raises(StorageError, match=words) as caught:
            TraceWriter(tmp_path / folder / "t.json")
        assert caught.value.filename == str(tmp_path / folder / "t.json")
    assert not (tmp_path / "missing").exists()


def test_a_folder_that_may_not_be_written_to_is_an_error(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    tmp_path.chmod(0o500)
    try:
        output = run_python(f"""
import os
from pathlib import Path
from peftds_ext.errors import StorageError
from peftds_ext.observe.trace import TraceWriter
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    TraceWriter(Path({str(tmp_path / "t.json")!r}))
except StorageError as error:
    print(error)
""")
    finally:
        tmp_path.chmod(0o700)
    assert "no permission to write there; give a path that you may write to" in output


def test_a_folder_or_no_path_is_a_configuration_error(tmp_path: Path) -> None:
    for path in (tmp_path, Path(), tmp_path / "a\0b"):
        with pytest.raises(
            ConfigError, match=re.escape(f"trace: {str(path)!r}") + r".*give the path of a file"
        ):
            TraceWriter(path)
    (tmp_path / "t.rank1.json").mkdir()
    with pytest.raises(ConfigError, match=r"t\.rank1\.json': it is a folder"):
        TraceWriter(tmp_path / "t.json", rank=1, world_size=2)
    with pytest.raises(ConfigError, match="is a folder"):
        TraceWriter(tmp_path, rank=1, world_size=2)
