# SPDX-License-Identifier: Apache-2.0
"""The storage engine: sequential reads and writes of a file, against fio and stock DeepSpeed's aio_handle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from baselines import fio
from baselines.deepspeed_aio import AioHandle
from interleave import Comparison, Contender, Measure, NotMeasured, collect, race
from io_report import GB, IoReport
from ours_io import OurEngine, checksums
from replay import recorded_clock
from report import Report
from storage import BLOCK, DEPTH, DIRECTIONS, Storage, Subject, file_system

pytestmark = pytest.mark.timeout(3600)

SUBJECTS: dict[str, Callable[[Storage, str], Subject]] = {
    "ours, io_uring": functools.partial(OurEngine, method="io_uring"),
    "ours, io_uring, ordinary memory": functools.partial(OurEngine, method="io_uring", arena=False),
    "fio io_uring": fio.Fio,
    "ours, threads": functools.partial(OurEngine, method="threads"),
    "fio threads": fio.Fio,
    "fio libaio": fio.Fio,
    "DeepSpeed aio_handle": AioHandle,
}
CHECKSUM_THREADS = (1, 2)
COUNTED_BYTES = 256 * BLOCK
"""Bytes of the passes in which system calls are counted; tracing makes them slow."""


def _contender(direction: str, subject: str) -> str:
    return f"{direction}: {subject}"


def _row(direction: str, subject: str, phase: str = "transfer") -> Measure:
    return Measure(_contender(direction, subject), _contender(direction, subject), (phase,), 1)


def _checksum_row(threads: int) -> Measure:
    label = f"CRC-32C of each block, {threads} thread{'s' if threads > 1 else ''}"
    return Measure(label, label, ("transfer",), 1)


def _comparisons(direction: str) -> Iterator[Comparison]:
    """Yield what ours is held to: fio's speed with the same method, and less processor time than stock."""
    uring, threads = (_row(direction, f"ours, {method}") for method in ("io_uring", "threads"))
    stock = _row(direction, "DeepSpeed aio_handle")
    plain = _row(direction, "ours, io_uring, ordinary memory")
    fio_uring = _row(direction, "fio io_uring")
    yield Comparison(f"{direction}, io_uring", uring, (fio_uring,), target=0.95)
    yield Comparison(f"{direction}, io_uring, ordinary memory", plain, (fio_uring,), target=None)
    yield Comparison(f"{direction}, threads", threads, (_row(direction, "fio threads"),), target=0.95)
    yield Comparison(
        f"{direction}, threads by libaio", threads, (_row(direction, "fio libaio"),), target=None
    )
    yield Comparison(f"{direction}, io_uring by stock", uring, (stock,), target=None)
    for method, target in (("io_uring", 1.0), ("threads", None)):
        ours, stock = (_row(direction, name, "cpu") for name in (f"ours, {method}", "DeepSpeed aio_handle"))
        label = f"{direction}, {method}, CPU time"
        yield Comparison(label, ours, (stock,), target, quantity="the bytes per CPU second")


CHECKSUMS = tuple(_checksum_row(threads) for threads in CHECKSUM_THREADS)
# All reads, then all writes: what is compared is measured close in time.
MEASURES = (*(_row(direction, name) for direction in DIRECTIONS for name in SUBJECTS), *CHECKSUMS)
COMPARISONS = tuple(comparison for direction in DIRECTIONS for comparison in _comparisons(direction))


def _open_subjects(storage: Storage, stack: ExitStack) -> tuple[dict[str, Subject], dict[str, str]]:
    """Return what can be measured, closed by ``stack``, and why the rest cannot, by contender."""
    subjects: dict[str, Subject] = {}
    reasons: dict[str, str] = {}
    for name, make in SUBJECTS.items():
        try:
            subjects[name] = make(storage, name)
        except NotMeasured as reason:
            reasons |= {_contender(direction, name): str(reason) for direction in DIRECTIONS}
        else:
            stack.callback(subjects[name].close)
    return subjects, reasons


def _contenders(subjects: dict[str, Subject], size: int) -> Iterator[Contender]:
    """Yield one contender per direction and subject."""
    for direction in DIRECTIONS:
        for name, subject in subjects.items():
            yield Contender(_contender(direction, name), functools.partial(subject.transfer, direction, size))


def _checksum_contender(subjects: dict[str, Subject], row: Measure, threads: int) -> Contender:
    for subject in subjects.values():
        if isinstance(subject, OurEngine):
            return checksums(row.contender, subject.memory, threads)
    raise NotMeasured("neither method of our engine is to be had here")


def _count_system_calls(subjects: dict[str, Subject], size: int) -> dict[str, float | str]:
    """Return the system calls per GB by contender, or why they were not counted."""
    found: dict[str, float | str] = {}
    for name, subject in subjects.items():
        for direction in DIRECTIONS:
            try:
                calls = subject.system_calls(direction, size)
            except NotMeasured as reason:
                found[_contender(direction, name)] = str(reason)
            else:
                found[_contender(direction, name)] = calls * GB / size
    return found


def _notes(subjects: dict[str, Subject], folder: Path) -> Iterator[str]:
    kind = file_system(folder) or "an unknown file system"
    yield f"files on {kind}, written before; blocks of {BLOCK:,} bytes, {DEPTH} in flight"
    for subject in subjects.values():
        yield from subject.notes
        yield from subject.check()
    try:
        yield f"version of fio: {fio.version()}"
    except NotMeasured as reason:
        yield str(reason)


@pytest.fixture(scope="module")
def report(pytestconfig: pytest.Config, publish: Callable[[Report], Report]) -> Report:
    size, rounds = pytestconfig.getoption("io_bytes"), pytestconfig.getoption("rounds")
    folder: Path = pytestconfig.getoption("io_path")
    any_folder: bool = pytestconfig.getoption("io_any_folder")
    with ExitStack() as stack:
        storage = stack.enter_context(Storage.make(folder, size, any_folder=any_folder))
        subjects, not_measured = _open_subjects(storage, stack)
        summing, no_checksums = collect(
            (row.contender, functools.partial(_checksum_contender, subjects, row, threads))
            for row, threads in zip(CHECKSUMS, CHECKSUM_THREADS, strict=True)
        )
        samples = race(
            [*_contenders(subjects, size), *summing],
            rounds=rounds,
            warmup_rounds=pytestconfig.getoption("warmup_rounds"),
        )
        samples.not_measured = not_measured | no_checksums
        report = IoReport(
            "storage engine", size, rounds, samples, MEASURES, COMPARISONS, (),
            calls_per_gb=_count_system_calls(subjects, min(size, COUNTED_BYTES)),
            read=_row("read", "ours, io_uring"), checksums=CHECKSUMS,
            notes=list(_notes(subjects, folder)),
        )  # fmt: skip
    return publish(report)


@pytest.mark.benchmark(timer=recorded_clock)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.label)
def test_row(measure: Measure, report: Report, record: Callable[[Report, Measure], None]) -> None:
    record(report, measure)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.label)
def test_target(comparison: Comparison, report: Report, hold: Callable[[Report, Comparison], None]) -> None:
    hold(report, comparison)
