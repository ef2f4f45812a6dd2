# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe where the system forbids or limits something: the same losses, and nothing left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nvme_runs
import pytest
from ds_runner import Outcome, Runner

SECONDS = 90.0


@pytest.fixture(scope="session")
def losses(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What a run gives without any limit."""
    disk = tmp_path_factory.mktemp("free")
    found: list[float] = runner.one(nvme_runs.train, disk=str(disk), timeout=SECONDS).result["losses"]
    assert len(set(found)) == nvme_runs.STEPS
    return found


def limited(runner: Runner, disk: Path, losses: list[float], **limits: Any) -> Outcome:
    outcome = runner.one(nvme_runs.train, disk=str(disk), timeout=SECONDS, **limits)
    assert "error" not in outcome.result, outcome.result["error"]["text"]
    assert outcome.result["losses"] == losses
    assert outcome.result["remains"] == []
    return outcome


def test_a_system_that_forbids_io_uring(runner: Runner, tmp_path: Path, losses: list[float]) -> None:
    outcome = limited(runner, tmp_path, losses, no_io_uring=True)
    assert outcome.result["method"] == "threads"
    said = [message for _, message in outcome.log if "storage engine: threads, since" in message]
    assert len(said) == 1
    assert "io_uring" in said[0]


def test_io_uring_demanded_where_it_is_forbidden(runner: Runner, tmp_path: Path) -> None:
    outcome = runner.one(
        nvme_runs.train,
        disk=str(tmp_path),
        io={"engine": "io_uring"},
        no_io_uring=True,
        timeout=SECONDS,
    )
    error = outcome.result["error"]
    assert error["classes"][0] == "ConfigError"
    assert 'Use the engine "threads", or leave the choice out' in error["text"]
    assert outcome.result["remains"] == []


@pytest.mark.parametrize("size", [64 << 10, 8 << 20])
def test_little_locked_memory(runner: Runner, tmp_path: Path, losses: list[float], size: int) -> None:
    limited(runner, tmp_path, losses, locked_memory=size)


def test_more_parameters_than_files_may_be_open(runner: Runner, tmp_path: Path) -> None:
    outcome = runner.one(
        nvme_runs.many_parameters, disk=str(tmp_path), count=1100, open_files=1024, timeout=SECONDS
    )
    assert outcome.result["records"] >= 1100
    assert len(set(outcome.result["losses"])) == 2
    assert outcome.result["remains"] == []


def test_two_engines_of_one_process_share_a_folder(
    runner: Runner, tmp_path: Path, losses: list[float]
) -> None:
    both = runner.one(nvme_runs.two_engines, disk=str(tmp_path / "both"), timeout=SECONDS).result
    alone = runner.one(nvme_runs.other_seed, disk=str(tmp_path / "alone"), timeout=SECONDS).result
    assert both["folders"] == 2
    assert list(both["losses"][0]) == losses
    assert list(both["losses"][1]) == alone
    assert both["remains"] == []


def test_a_partition_is_read_into_memory_of_any_kind(runner: Runner, tmp_path: Path) -> None:
    result = runner.one(nvme_runs.into_foreign_memory, disk=str(tmp_path), timeout=SECONDS).result
    assert result == {"same": [True] * 3, "status": "NOT_AVAILABLE"}


@pytest.mark.parametrize("method", [None, "threads"])
def test_nothing_is_left_in_the_process_when_the_parameters_are_gone(
    runner: Runner, tmp_path: Path, method: str | None
) -> None:
    result = runner.one(nvme_runs.gather_and_drop, disk=str(tmp_path), method=method, timeout=SECONDS).result
    assert result["records"] == nvme_runs.SWAPPED
    assert result["threads of ours"] > 0
    assert result["gone"]
    assert result["threads left"] == 0
    assert result["open"] == []
    assert result["folders"] == [".lock"]
