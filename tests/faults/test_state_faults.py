# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on a disk that fails: they are old or new, or an error says that they are lost."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import state_runs
from ds_models import furthest
from ds_runner import Runner, ScenarioFailed

KEY = "zero_optimization.offload_optimizer.nvme_path"


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return str(tmp_path / "disk")


def _fail(runner: Runner, disk: str, faults: str, **arguments: Any) -> dict[str, Any]:
    env = {"PEFTDS_IO_FAULTS": faults}
    result: dict[str, Any] = runner.one(state_runs.fail, env=env, disk=disk, timeout=90, **arguments).result
    assert "error" in result, "nothing was raised"
    assert result["error"]["module"] == "peftds_ext.errors"
    assert not result["remains"]
    return result


@pytest.fixture(scope="session")
def groups(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many sub-groups there are, each of which is one transfer."""
    disk = str(tmp_path_factory.mktemp("good"))
    result = runner.one(state_runs.fail, disk=disk, timeout=90).result
    assert "error" not in result, result["error"]["text"]
    count: int = result["groups"]
    assert count >= 4
    return count


@pytest.mark.parametrize("saved", [True, False])
def test_a_step_that_fails_half_way_loses_the_states(
    runner: Runner, disk: str, tmp_path: Path, groups: int, saved: bool
) -> None:
    save = str(tmp_path / "checkpoints") if saved else ""
    result = _fail(runner, disk, f"write:eio@{groups + 2}", save=save)
    assert result["initialized"]
    assert result["error"]["classes"][0] == "StateLostError"
    assert "Input/output error" in result["error"]["text"]
    left = f"resume from {save}/before" if saved else "no checkpoint was made in this run"
    for name in ("error", "error of step", "error of read", "error of save"):
        assert result[name]["classes"][0] == "StateLostError", name
        assert left in result[name]["text"]


def test_zero_2_loses_the_states_as_well(runner: Runner, disk: str) -> None:
    result = _fail(runner, disk, "write:eio@2", stage=2)
    assert result["error of step"]["classes"][0] == "StateLostError"
    assert result["error of read"]["classes"][0] == "StateLostError"


def test_a_read_that_fails_first_changes_nothing(runner: Runner, disk: str) -> None:
    result = runner.one(state_runs.fail_first, disk=disk, timeout=90).result
    assert result["error"]["classes"][0] == "StorageError"
    assert result["apart"] == [0.0, 0.0]
    assert len(result["losses"]) == 2


def test_a_step_by_deepspeed_that_fails_half_way_loses_the_states(runner: Runner, disk: str) -> None:
    result = runner.one(state_runs.fail_under_hooks, disk=disk, timeout=90).result
    assert result["errors"] == ["StateLostError", "StateLostError"]


@pytest.mark.parametrize(("fault", "kind"), [("eio", "StorageError"), ("enospc", "StorageFullError")])
def test_a_write_that_fails_at_initialization(runner: Runner, disk: str, fault: str, kind: str) -> None:
    result = _fail(runner, disk, f"write:{fault}@2")
    assert not result["initialized"]
    assert result["error"]["classes"][0] == kind


def test_a_disk_without_room_for_the_states(runner: Runner, disk: str) -> None:
    result = runner.one(state_runs.full_disk, disk=disk, size="32k", timeout=90).result
    if "skip" in result:
        pytest.skip(result["skip"])
    assert result["error"]["classes"][0] == "StorageFullError"
    assert result["error"]["errno"] == errno.ENOSPC
    assert not result["remains"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_a_number_changes_nothing(runner: Runner, disk: str, stage: int) -> None:
    result = runner.one(state_runs.not_a_number, disk=disk, stage=stage, timeout=90).result
    assert result["apart"] == [0.0, 0.0]
    assert 0 < result["norm"] < float("inf")
    assert result["loss"] == result["loss"]


@pytest.mark.parametrize(("where", "kind"), [(100, "CorruptDataError"), (3 * 4096 + 7, "StateLostError")])
def test_bytes_that_somebody_changed(runner: Runner, disk: str, where: int, kind: str) -> None:
    error = runner.one(state_runs.damaged, disk=disk, where=where, timeout=90).result["error"]
    assert error["classes"][0] == kind
    assert "the checksum is" in error["text"]


def test_a_run_that_is_killed_in_mid_step_is_resumed(runner: Runner, disk: str, tmp_path: Path) -> None:
    save = str(tmp_path / "checkpoints")
    with pytest.raises(ScenarioFailed):
        runner.one(state_runs.killed, disk=disk, save=save, timeout=90)
    assert len(list(Path(disk).glob("peftds_ext_swap/rank*"))) == 1
    resumed = runner.one(state_runs.resume, disk=disk, save=save, timeout=90)
    whole = runner.one(state_runs.resume, disk=disk, save="", timeout=90).result
    assert resumed.result["folders"] == 1
    assert resumed.said("removed 1 swap folder") == 1
    assert resumed.result["losses"] == whole["losses"]
    assert furthest(resumed.result["masters"], whole["masters"]) == 0.0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_that_cannot_be_made(runner: Runner, tmp_path: Path, stage: int) -> None:
    (tmp_path / "file").write_text("")
    disk = str(tmp_path / "file" / "disk")
    result = runner.one(state_runs.fail, disk=disk, stage=stage, timeout=90).result
    assert not result["initialized"]
    assert result["error"]["classes"][0] == "StorageError"
    assert KEY in result["error"]["text"]
