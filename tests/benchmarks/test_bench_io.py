# SPDX-License-Identifier: Apache-2.0
"""The storage benchmark: a miniature run, and what it refuses, counts and compares."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import peftds_ext

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = {
    "read: ours, threads",
    "write: ours, threads",
    "CRC-32C of each block, 1 thread",
    "CRC-32C of each block, 2 threads",
}

pytestmark = pytest.mark.timeout(900)  # the first run may have to compile DeepSpeed's op


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark from ``folder``; its JSON is ``result.json`` there."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    package = str(Path(peftds_ext.__file__).parents[1])
    inherited["PYTHONPATH"] = os.pathsep.join([package, inherited.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(BENCHMARKS / "bench_io.py")]
    return subprocess.run(
        [*command, "--benchmark-json", "result.json", *arguments],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def without_tools(folder: Path) -> dict[str, str]:
    """Return variables under which there is no fio, no strace, no compiler, and nothing compiled earlier."""
    tools = folder / "bin"
    tools.mkdir()
    return {"PATH": str(tools), "CXX": str(tools / "c++"), "TORCH_EXTENSIONS_DIR": str(folder / "ops")}


def test_without_tools_ours_is_measured_and_the_table_says_why_the_rest_is_not(tmp_path: Path) -> None:
    arguments = ("--io-bytes", str(8 << 20), "--rounds", "3", "--warmup-rounds", "1", "--io-any-folder")
    process = run(tmp_path, *arguments, **without_tools(tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr
    (report,) = json.loads((tmp_path / "result.json").read_text())["reports"]
    rows: dict[str, Any] = {row["label"]: row for row in report["rows"]}

    assert rows.keys() >= OURS
    for label in OURS:
        slow, fast = rows[label]["bytes_per_second_quartiles"]
        assert 0.0 < slow <= rows[label]["bytes_per_second"] <= fast
        assert rows[label]["cpu_seconds_per_gb"] > 0.0
        assert rows[label]["system_calls_per_gb"] is None
    for name in ("fio io_uring", "fio threads", "fio libaio"):
        assert report["not_measured"][f"read: {name}"] == "fio is not installed"
    assert "DeepSpeed" in report["not_measured"]["write: DeepSpeed aio_handle"]
    assert all("not_measured" in ratio for ratio in report["ratios"])
    assert "system calls not counted: strace is not installed" in process.stdout
    assert "same work: ours, threads writes and reads back every block" in process.stdout
    assert not list(tmp_path.glob("peftds_bench_io_*"))


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_does_what_it_is_asked_to(tmp_path: Path) -> None:
    from baselines.fio import ENGINES, Fio
    from interleave import NotMeasured
    from storage import STRIPE, Storage

    storage = Storage(tmp_path, 8 * STRIPE, any_folder=True)
    for name in ENGINES:
        try:
            subject = Fio(storage, name)
        except NotMeasured as reason:
            pytest.skip(f"fio cannot work here: {reason}")
        for direction in ("read", "write"):
            phases = subject.transfer(direction, storage.size)
            assert phases["transfer"] > 0.0
            assert phases["cpu"] >= 0.0


def test_fio_that_moves_less_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baselines import fio
    from interleave import NotMeasured
    from storage import STRIPE, Storage

    job = {"error": 0, "read": {"io_bytes": 4096, "short_ios": 0, "runtime": 1}}
    liar = tmp_path / "fio"
    liar.write_text(f"#!/bin/sh\necho '{json.dumps({'jobs': [job]})}'\n")
    liar.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NotMeasured, match=r"error, bytes and short transfers are \(0, 4096, 0\)"):
        fio.Fio(Storage(tmp_path, STRIPE, any_folder=True), "fio io_uring")


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_system_calls_of_this_process_are_counted() -> None:
    import system_calls
    from interleave import NotMeasured

    def work() -> None:
        for _ in range(2000):
            os.getppid()

    try:
        counted = system_calls.of_this_process(work)
    except NotMeasured as reason:
        pytest.skip(str(reason))
    assert counted == pytest.approx(2000, abs=50)  # the calls that tracing itself takes vary by a few


def test_a_block_that_arrives_wrong_is_found(tmp_path: Path) -> None:
    from storage import BLOCK, STRIPE, Storage, check_round_trip

    path = Storage(tmp_path, STRIPE, any_folder=True).make_file("file")
    memory = torch.zeros(STRIPE, dtype=torch.uint8)

    def transfer(direction: str, size: int, *, swapped: bool) -> None:
        if direction == "write":
            path.write_bytes(memory.numpy().tobytes())
            return
        memory.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
        if swapped:
            memory[: 2 * BLOCK] = memory[: 2 * BLOCK].roll(BLOCK)

    check_round_trip("good", path, memory, lambda *what: transfer(*what, swapped=False))
    with pytest.raises(ArithmeticError, match="bad: 2 of 8 blocks were read wrong"):
        check_round_trip("bad", path, memory, lambda *what: transfer(*what, swapped=True))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--io-bytes", "1048576"), "--io-bytes must be a positive multiple of 8388608, got 1048576"),
        (("--io-path", "missing"), "--io-path must be a folder, which missing is not"),
        (("--io-bytes", str(1 << 60), "--io-any-folder"), "bytes free and "),
    ],
)
def test_refuses_before_it_measures(arguments: tuple[str, ...], complaint: str, tmp_path: Path) -> None:
    process = run(tmp_path, *arguments)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert complaint in process.stdout + process.stderr


def test_refuses_memory_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import storage

    monkeypatch.setattr(storage, "file_system", lambda folder: "tmpfs")
    refused = storage.complaint(tmp_path, storage.STRIPE, 1, any_folder=False)
    assert refused is not None
    assert "is on a tmpfs, which is memory and no disk" in refused
    assert storage.complaint(tmp_path, storage.STRIPE, 1, any_folder=True) is None
