# SPDX-License-Identifier: Apache-2.0
"""The check for machines with a GPU, rehearsed without one: it passes, and finds what it is there to find."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import gpu_check
import gpu_deepspeed
import gpu_streaming
import gpu_streaming_rates
import pytest
import torch
from gpu_checking import Check, guarded
from gpu_deepspeed import Engine
from gpu_place import StandIn
from gpu_streaming import REHEARSED, Case, Files
from gpu_streaming_models import Trainer, build, write
from lazy_device import LazyDevice, LazyMark
from torch import Tensor

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_rehearsal_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    status = gpu_check.main(["--rehearse", "--json", str(report), "--folder", str(tmp_path)])
    written = json.loads(report.read_text())
    assert status == 0, [check for check in written["checks"] if not check["passed"]]
    names = [check["name"] for check in written["checks"]]
    for case in gpu_streaming.CASES:
        assert f"{case.name}: the bits of the resident model, 4 budgets" in names
    assert capsys.readouterr().out.count("ok    ") == len(names)
    rates = written["timings"]["rates"]
    assert [row["tokens"] for row in rates["steps"]] == list(gpu_streaming_rates.REHEARSED.counts)
    assert rates.keys() >= {"sweep_gb_per_s", "pinned_copy_gb_per_s", "from_disk_0", "from_disk_50"}
    assert list(tmp_path.iterdir()) == [report]


# what it is there to find


class CopiesTooLate(LazyDevice):
    """Layers are used before they have come."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: LazyMark) -> tuple[LazyMark, LazyMark]:
        return self.mark(), self.mark()


class LetsTheHostWait(LazyDevice):
    def wait(self, mark: LazyMark, on: LazyMark | None = None) -> None:
        self.finish(mark)


class KeepsAll(LazyDevice):
    """Memory is never given back."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def allocate(self, size: int) -> Tensor:
        self.kept.append(super().allocate(size))
        return self.kept[-1]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return write(build(REHEARSED.shape, CPU), tmp_path / "model.safetensors")


def failed(checks: Iterator[Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


def test_a_use_that_does_not_wait_for_its_copy_is_found(tmp_path: Path, files: Files) -> None:
    case = Case("short", (Trainer.step,))
    checks = gpu_streaming.same_bits(StandIn(CopiesTooLate), REHEARSED, files, tmp_path, case)
    assert failed(checks) == ["short: the bits of the resident model, 4 budgets"]


def test_a_wait_of_the_host_is_found(tmp_path: Path, files: Files) -> None:
    checks = gpu_streaming.nobody_waits(StandIn(LetsTheHostWait), REHEARSED, files, tmp_path)
    assert failed(checks) == ["no wait for the device in forward and backward"]


def test_memory_that_is_kept_is_found(tmp_path: Path, files: Files) -> None:
    assert failed(gpu_streaming.memory(StandIn(KeepsAll), REHEARSED, files, tmp_path)) == ["device memory"]


@pytest.mark.parametrize(
    ("ratio", "overlap", "waits", "hidden", "passed"),
    [
        (1.02, 0.95, 0, True, True),
        (1.04, 0.95, 0, True, False),
        (1.02, 0.80, 0, True, False),
        (9.00, 0.10, 0, False, True),
        (1.00, 1.00, 1, False, False),
    ],
)
def test_steps_are_judged_where_copies_can_hide(
    ratio: float, overlap: float, waits: int, hidden: bool, passed: bool
) -> None:
    place = StandIn(LazyDevice)
    place.judged = True
    row = {"tokens": 8, "streamed_s": 1.0, "of_the_limit": 1.0}
    row |= {"ratio": ratio, "overlap": overlap, "waits": waits, "hidden": hidden}
    (check,) = gpu_streaming_rates._judge(place, row)
    assert check.passed is passed, check.detail


def test_sizes_follow_what_is_free() -> None:
    large = gpu_streaming_rates.fitting(140 << 30, 120 << 30, 60 << 30)
    small = gpu_streaming_rates.fitting(2 << 30, 2 << 30, 2 << 30)
    assert (large.shape.hidden, small.shape.hidden) == (4096, 1024)
    assert large.counts[-1] == 32768 > small.counts[-1]
    tiny = gpu_streaming_rates.fitting(1 << 28, 1 << 28, 1 << 28)
    assert tiny.counts == (128,)


# whatever happens, the rest goes on


def test_an_exception_is_a_failed_check_with_its_end() -> None:
    def checks() -> Iterator[Check]:
        yield Check("first", True)
        raise ValueError("no such luck")

    first, second = guarded("part", checks)
    assert (first.name, second.name, second.passed) == ("first", "part", False)
    assert second.detail.endswith("ValueError: no such luck")


RECORD = """
import json, os, sys, time
print(json.dumps({"check": {"name": "one", "passed": True, "detail": ""}, "timings": {"ms": 3}}),
      file=open(sys.argv[1], "w"), flush=True)
"""


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("time.sleep(60)", "did not end in 1 s, after the check 'one'"),
        ("os.abort()", "ended with status -6, after the check 'one'"),
        ("", None),
    ],
)
def test_a_stage_that_hangs_or_crashes_is_a_failed_check(
    tmp_path: Path, ending: str, told: str | None
) -> None:
    records = tmp_path / "records"
    command = [sys.executable, "-c", RECORD + ending, str(records)]
    checks, timings = gpu_check.checked_apart(command, "stage", 1 if "sleep" in ending else 30, records)
    expected = [Check("one", True)] + ([Check("stage", False, told)] if told else [])
    assert (checks, timings) == (expected, {"ms": 3})


def test_a_machine_without_a_gpu_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_check.main(["--only", "streaming"]) == 2
    assert "a CUDA build of torch" in capsys.readouterr().out


# DeepSpeed


def test_without_deepspeed_its_part_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(gpu_deepspeed.checks(tmp_path, True, {})) == [
        Check("DeepSpeed", True, "skipped: deepspeed is not installed")
    ]


def test_an_engine_that_does_not_answer_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nsys.stdin.read()\n")
    monkeypatch.setattr(gpu_deepspeed, "WORKER", worker)
    monkeypatch.setattr(gpu_deepspeed, "ANSWER_S", 0.2)
    engine = Engine("host memory")

    def checks() -> Iterator[Check]:
        gpu_deepspeed.results(engine, gpu_deepspeed.REHEARSED, tmp_path, True)
        yield Check("never", True)

    (check,) = guarded("engine", checks)
    assert not check.passed
    assert "did not answer within 0.2 s" in check.detail


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"losses": [1.0, 2.5]}, "losses [1.0, 2.5]"),
        ({"losses": [1.0, float("nan")]}, "nan"),
        ({"masters": "b"}, "masters"),
        ({"counts": {"bytes": 0, "waits": 0}}, "no layers were copied"),
        ({"counts": {"bytes": 9, "waits": 2}}, "waited 2 times"),
    ],
)
def test_an_engine_is_compared_with_the_resident_one(changes: dict[str, Any], told: str) -> None:
    got: dict[str, Any] = {"losses": [1.0, 2.0], "masters": "a"}
    references = {False: dict(got)}
    counts = changes.pop("counts", {"bytes": 9, "waits": 0})
    run: Future[dict[str, Any]] = Future()
    run.set_result({**got, **changes, "told": {"counts": counts, "late": False}})
    (check,) = gpu_deepspeed._judge("engine", Engine("host memory"), run, references)
    assert check.passed is (not told)
    assert told in check.detail
