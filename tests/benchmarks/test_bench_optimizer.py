# SPDX-License-Identifier: Apache-2.0
"""The benchmark of optimizer states, small: every form is measured on every tier, and bytes are counted."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_bench_miniature import BENCHMARKS, HAS_DEEPSPEED, MINIATURE, measured, run, without_compiler

FORMS = {"fp32": 12.0, "fp32, split master": 10.0, "bf16, split master": 6.0, "int8, split master": 4.0}
"""Bytes of a form's states per element, less the scales of int8."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def can_do_direct(folder: Path) -> bool:
    """Whether files in ``folder`` can be opened for direct I/O."""
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def write_directly(path: Path, size: int) -> None:
    """Write ``size`` bytes, a multiple of a page, past the page cache."""
    with mmap.mmap(-1, size) as memory:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            assert os.write(descriptor, memory) == size
        finally:
            os.close(descriptor)


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_every_form_is_measured_on_a_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    process, output = run(
        "bench_optimizer.py",
        tmp_path,
        *MINIATURE,
        "--tier",
        "nvme",
        "--nvme-path",
        str(disk),
        environment=without_compiler(tmp_path) | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(output.read_text())
    (report,) = result["reports"]

    rows: dict[str, Any] = {row["label"]: row for row in report["rows"]}
    for form, size in FORMS.items():
        row = rows[f"ours, NVMe, {form}"]
        assert 0.0 < row["step ms"] < row["sum ms"]
        assert row["disk"] == pytest.approx(size, abs=0.5)
        assert row["memory B/el"] < 1.0
        if can_do_direct(disk):
            assert row["read B/el"] == pytest.approx(size, abs=0.5)
            assert row["written"] == pytest.approx(size, abs=0.5)
    for label in ("stock, NVMe", "stock, NVMe, pipelined"):
        assert f"{label}: step" not in measured(result)
    assert "not measured: DeepSpeed's cpu_adam op cannot be loaded or built: " in process.stdout
    assert "limit: not measured: fio is not installed" in report["notes"]
    assert not list(disk.glob("peftds_bench_optimizer_*"))


def test_refuses_a_folder_that_is_none(tmp_path: Path) -> None:
    process, _ = run("bench_optimizer.py", tmp_path, "--nvme-path", "missing")
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--nvme-path must be a folder, which missing is not" in process.stderr


def test_bytes_are_counted_by_phase_and_between_rounds(tmp_path: Path) -> None:
    from counted import OUTSIDE, WRITTEN, counted, counting

    if not can_do_direct(tmp_path):
        pytest.skip("direct I/O is refused here, and what the page cache takes is not counted")
    size = 1 << 20
    steps: dict[str, Callable[[], object]] = {
        "still": lambda: None,
        "busy": lambda: write_directly(tmp_path / "file", size),
    }
    round_of = counting(steps)
    first = round_of()
    write_directly(tmp_path / "other", 2 * size)
    second = round_of()
    for phases in (first, second):
        assert phases[counted("still", WRITTEN)] == 0.0
        assert phases[counted("busy", WRITTEN)] == pytest.approx(size, rel=0.1)
        assert phases["busy"] > phases["still"] > 0.0
    assert first[OUTSIDE] == 0.0
    assert second[OUTSIDE] == pytest.approx(2 * size, rel=0.1)


def rounds_of(**moved: float) -> Any:
    from interleave import Samples
    from optimizer_report import FIO, MOVED

    rounds = {name: [{"step": 1.0, **dict.fromkeys(MOVED, count)}] for name, count in moved.items()}
    return Samples(rounds={**rounds, FIO: [{"transfer": 4.0}]})


def test_the_limit_is_what_the_disk_needs_for_the_bytes() -> None:
    from optimizer_report import bytes_of, derive, limit_of

    samples = rounds_of(ours=50.0)
    derive(samples, "ours", 200)
    assert samples.seconds(bytes_of("ours"), ("step",)) == [100.0]
    assert samples.seconds(limit_of("ours"), ("step",)) == [2.0]


def test_a_step_that_goes_on_after_it_has_returned_is_found_out() -> None:
    from counted import OUTSIDE
    from optimizer_report import check_ended

    samples = rounds_of(ours=1e6)
    samples.rounds["ours"][0][OUTSIDE] = 4096.0
    check_ended(samples, ["ours"])
    samples.rounds["ours"][0][OUTSIDE] = 1e6
    with pytest.raises(ArithmeticError, match="ours: 1000000 of 3000000 bytes move between its rounds"):
        check_ended(samples, ["ours"])


def test_without_counted_bytes_there_is_no_limit() -> None:
    from interleave import NotMeasured
    from optimizer_report import bytes_of, derive, limit_of

    samples = rounds_of(ours=0.0)
    derive(samples, "ours", 200)
    for name in (bytes_of("ours"), limit_of("ours")):
        with pytest.raises(NotMeasured, match="no bytes were counted"):
            samples.seconds(name, ("step",))


def test_without_fio_bytes_still_compare() -> None:
    from interleave import NotMeasured
    from optimizer_report import FIO, bytes_of, derive, limit_of

    samples = rounds_of(ours=50.0)
    samples.not_measured[FIO] = "fio is not installed"
    derive(samples, "ours", 200)
    assert samples.seconds(bytes_of("ours"), ("step",)) == [100.0]
    with pytest.raises(NotMeasured, match="fio is not installed"):
        samples.seconds(limit_of("ours"), ("step",))


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_moves_both_ways(tmp_path: Path) -> None:
    from baselines.fio import FioBothWays
    from interleave import NotMeasured
    from storage import STRIPE, Storage

    try:
        both_ways = FioBothWays(Storage(tmp_path, 16 * STRIPE, any_folder=True), "fio")
    except NotMeasured as reason:
        pytest.skip(f"fio cannot work here: {reason}")
    assert both_ways.transfer()["transfer"] > 0.0


def test_fio_whose_writes_fall_short_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baselines.fio import FioBothWays
    from interleave import NotMeasured
    from storage import STRIPE, Storage

    def job(direction: str, count: int) -> dict[str, Any]:
        return {"error": 0, direction: {"io_bytes": count, "short_ios": 0, "runtime": 5}}

    liar = tmp_path / "fio"
    jobs = [job("read", STRIPE), job("write", 4096)]
    liar.write_text(f"#!/bin/sh\necho '{json.dumps({'jobs': jobs})}'\n")
    liar.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NotMeasured, match=r"error, bytes and short transfers are \(0, 4096, 0\)"):
        FioBothWays(Storage(tmp_path, STRIPE, any_folder=True), "fio")
