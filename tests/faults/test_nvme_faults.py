# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe where the disk fails: a typed error that helps reaches the caller, or nothing shows."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvme_runs
import pytest
from ds_runner import Outcome, Runner, ScenarioFailed, environment, free_port

KEY = "zero_optimization.offload_param.nvme_path"
SECONDS = 90.0
"""No scenario takes longer, whatever fails."""

Train = Callable[..., Outcome]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def train(runner: Runner, disk: Path) -> Train:
    def train(faults: str = "", **arguments: Any) -> Outcome:
        env = {"PEFTDS_IO_FAULTS": faults}
        return runner.one(nvme_runs.train, env=env, timeout=SECONDS, **{"disk": str(disk), **arguments})

    return train


@pytest.fixture(scope="session")
def losses(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What a run gives on a disk that does not fail."""
    disk = tmp_path_factory.mktemp("good")
    result = runner.one(nvme_runs.train, disk=str(disk), timeout=SECONDS).result
    assert "error" not in result, result["error"]["text"]
    assert result["remains"] == []
    assert result["in shared memory"] == []
    found: list[float] = result["losses"]
    assert len(set(found)) == nvme_runs.STEPS
    return found


def error_of(result: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the error, which is one of the package's, of this class, and left nothing on the disk."""
    assert "error" in result, "nothing was raised"
    error: dict[str, Any] = result["error"]
    assert error["classes"][0] == kind, error
    assert error["module"] == "peftds_ext.errors"
    assert "PeftdsError" in error["classes"]
    assert not result["remains"]
    return error


# faults of the disk that a run survives


@pytest.mark.parametrize("method", ["io_uring", "threads"])
def test_short_and_interrupted_transfers_change_nothing(
    train: Train, losses: list[float], method: str
) -> None:
    faults = "any:short@p0.2;any:eintr@p0.2;any:reorder@p0.1;any:delay=1@p0.1;seed=1"
    io = {"engine": method, "checksum": "always", "block_bytes": "64KiB"}
    result = train(faults, io=io).result
    if "error" in result and "was asked for" in result["error"]["text"]:
        pytest.skip(result["error"]["text"])
    assert result["losses"] == losses
    assert result["method"] == method
    assert result["remains"] == []


@pytest.mark.parametrize("io", [{"direct": False}, {"queue_depth": 1, "block_bytes": 4096}])
def test_settings_change_nothing(train: Train, losses: list[float], io: dict[str, Any]) -> None:
    assert train(io=io).result["losses"] == losses


# faults that it does not


@pytest.mark.parametrize("number", [1, 7, 25])
def test_a_read_that_fails(train: Train, losses: list[float], disk: Path, number: int) -> None:
    result = train(f"read:eio@{number}").result
    error = error_of(result, "StorageError")
    assert error["errno"] == errno.EIO
    assert error["filename"].startswith(f"{disk}/peftds_ext_swap/rank0-pid")
    assert "read of 1048576 bytes at offset" in error["text"]
    assert "see the kernel's log" in error["text"]
    assert result["initialized"]
    assert len(result["losses"]) < nvme_runs.STEPS
    assert result["losses"] == losses[: len(result["losses"])]
    assert bool(result["losses"]) == (number == 25)


@pytest.mark.parametrize(
    ("fault", "kind", "number", "remedy"),
    [
        ("eio", "StorageError", errno.EIO, "see the kernel's log"),
        ("enospc", "StorageFullError", errno.ENOSPC, "free space on the disk or choose another folder"),
    ],
)
def test_a_write_that_fails_at_initialization(
    train: Train, disk: Path, fault: str, kind: str, number: int, remedy: str
) -> None:
    result = train(f"write:{fault}@3").result
    assert not result["initialized"]
    error = error_of(result, kind)
    assert error["errno"] == number
    assert error["filename"].startswith(f"{disk}/peftds_ext_swap/rank0-pid")
    assert "write of 1048576 bytes at offset 2097152" in error["text"]
    assert remedy in error["text"]


def test_a_disk_that_is_full(train: Train, disk: Path) -> None:
    result = train(mount="size=3m").result
    if "skip" in result:
        pytest.skip(result["skip"])
    assert not result["initialized"]
    error = error_of(result, "StorageFullError")
    assert error["errno"] == errno.ENOSPC
    assert error["filename"].startswith(f"{disk}/peftds_ext_swap/rank0-pid")
    assert "reserving 1048576 bytes" in error["text"]
    assert "free space on the disk or choose another folder" in error["text"]


def test_a_file_that_is_cut_between_steps(train: Train, losses: list[float], disk: Path) -> None:
    result = train(after_two="truncate").result
    error = error_of(result, "CorruptDataError")
    assert result["losses"] == losses[:2]
    assert f"{disk}/peftds_ext_swap/rank0-pid" in error["text"]
    assert "shorter than it was" in error["text"]


def test_a_byte_that_changes_between_steps(train: Train, losses: list[float], disk: Path) -> None:
    result = train(after_two="flip", io={"checksum": "always"}).result
    error = error_of(result, "CorruptDataError")
    assert result["losses"] == losses[:2]
    assert f"{disk}/peftds_ext_swap/rank0-pid" in error["text"]
    assert "block of 1048576 bytes at offset 3145728: the checksum is" in error["text"]
    assert "start the run again" in error["text"]


def test_a_script_that_catches_nothing_ends_with_the_error_and_leaves_nothing(disk: Path) -> None:
    script = f"""
import sys
sys.path[:0] = [{str(Path(nvme_runs.__file__).parent)!r}]
import deepspeed, peftds_ext
from pathlib import Path
import nvme_runs
from ds_worker import Run
job = dict.fromkeys(("adam", "rank", "world")) | {{"mode": "ours", "tmp": "."}}
peftds_ext.install()
engine = nvme_runs.engine_of(Run(job), {str(disk)!r})
for batch in nvme_runs.tokens(4):
    nvme_runs.step(engine, batch)
"""
    env = environment(
        PEFTDS_IO_FAULTS="read:eio@20",
        MASTER_PORT=str(free_port()),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert f"peftds_ext.errors.StorageError: [Errno {errno.EIO}] read of 1048576 bytes" in last
    assert f"{disk}/peftds_ext_swap/rank0-pid" in last
    assert [path.name for path in disk.rglob("*")] == ["peftds_ext_swap", ".lock"]


# folders that do not do


def test_a_folder_that_is_missing_is_made(train: Train, losses: list[float], disk: Path) -> None:
    deep = disk / "a" / "b"
    result = train(disk=str(deep)).result
    assert result["losses"] == losses
    assert result["remains"] == []


def test_a_read_only_folder(train: Train, disk: Path) -> None:
    result = train(mount="ro").result
    if "skip" in result:
        pytest.skip(result["skip"])
    error = error_of(result, "StorageError")
    assert (error["errno"], error["filename"]) == (errno.EROFS, f"{disk}/peftds_ext_swap")
    assert f"{KEY} cannot be used: it is on a read-only file system; give a folder" in error["text"]


def test_a_path_that_is_a_file(train: Train, disk: Path) -> None:
    disk.write_text("content")
    error = error_of(train().result, "StorageError")
    assert error["filename"] == str(disk)
    assert f"{KEY} cannot be used: it is not a folder" in error["text"]
    assert "give a folder" in error["text"]
    assert disk.read_text() == "content"


def test_a_path_that_is_left_out(runner: Runner) -> None:
    for scenario in (nvme_runs.train, nvme_runs.under_zero_init):
        result = runner.one(scenario, disk=None, timeout=SECONDS).result
        error = error_of({"remains": None, **result}, "ConfigError")
        assert error["text"].startswith(f'{KEY}: missing. "device" is "nvme", so give a folder')


@pytest.mark.parametrize(
    ("faults", "io", "text"),
    [
        ("read:nothing@1", {}, "PEFTDS_IO_FAULTS: 'read:nothing@1'"),
        ("", {"queue_depht": 3}, "peftds_ext.io.queue_depht: unknown key. Did you mean"),
        ("", {"engine": "aio"}, "peftds_ext.io.engine: "),
    ],
)
def test_a_wrong_configuration(train: Train, disk: Path, faults: str, io: dict[str, Any], text: str) -> None:
    error = error_of(train(faults, io=io).result, "ConfigError")
    assert error["text"].startswith(text)


def test_a_failure_to_start_leaves_nothing_while_the_process_goes_on(runner: Runner, disk: Path) -> None:
    env = {"PEFTDS_IO_FAULTS": "read:nothing@1"}
    result = runner.one(nvme_runs.under_zero_init, disk=str(disk), env=env, timeout=SECONDS).result
    assert result["error"]["classes"][0] == "ConfigError"
    assert list(disk.rglob("*")) == []


# killed


def test_after_a_kill_the_next_run_reclaims_the_folder(train: Train, losses: list[float], disk: Path) -> None:
    with pytest.raises(ScenarioFailed, match="ended with -9"):
        train(after_two="kill")
    (left,) = disk.glob("peftds_ext_swap/rank0-*")
    assert (left / "data.bin").stat().st_size == nvme_runs.SWAPPED << 20
    again = train()
    assert again.said("removed 1 swap folder(s) of dead processes") == 1
    assert again.result["losses"] == losses
    assert not left.exists()
    assert again.result["remains"] == []
    assert [path.name for path in (disk / "peftds_ext_swap").iterdir()] == [".lock"]
