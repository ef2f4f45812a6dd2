# SPDX-License-Identifier: Apache-2.0
"""fio, with the same file size, block and depth as ours. It keeps its own time; a run is a process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import system_calls
from interleave import NotMeasured, Phases
from storage import BLOCK, DEPTH, DIRECTIONS, Storage, cpu_seconds

ENGINES = {"fio io_uring": "io_uring", "fio threads": "psync", "fio libaio": "libaio"}
"""fio's engine by the name of the subject. psync has one transfer in flight: as many threads as the depth
share the file, each with a part of its own. (fio can also let them take turns at one stream, by
``--io_submit_mode=offload``; but of such runs of 3.33 some never end.)"""

# What costs fio time and is no part of the transfer is switched off.
_SAME_FOR_ALL = (
    "--thread", "--direct=1", f"--bs={BLOCK}", "--scramble_buffers=0", "--disk_util=0", "--invalidate=0",
    "--output-format=json",
)  # fmt: skip
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_START_RUNS = 3
_PATIENCE_S = 300.0


class FioError(RuntimeError):
    """fio failed, or did not do what it was asked to; the message has its own words."""


class Fio:
    """fio with one of :data:`ENGINES`.

    Processor time is that of the whole process, since fio's own count leaves out what the kernel's threads do
    for it; taken off is the median of runs that move one block per thread.

    Raises:
        NotMeasured: fio is missing, or fails here with this engine.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._threads = DEPTH if ENGINES[name] == "psync" else 1
        part = storage.size // self._threads
        self._base = [
            _executable(), "--group_reporting", *_SAME_FOR_ALL,
            *_job(storage.make_file(name), ENGINES[name], part, DEPTH // self._threads),
            f"--numjobs={self._threads}", f"--offset_increment={part}",
        ]  # fmt: skip
        self.name = name
        self.notes: list[str] = []
        try:
            self._start_cpu = {direction: self._cpu_of_start(direction) for direction in DIRECTIONS}
        except FioError as error:
            raise NotMeasured(str(error)) from error

    def transfer(self, direction: str, size: int) -> Phases:
        job, cpu = self._run(direction, size)
        milliseconds = job[direction]["runtime"]
        if milliseconds == 0:
            raise FioError(f"{self.name}: {size} bytes take less than fio's clock shows; raise --io-bytes")
        return {"transfer": milliseconds / 1e3, "cpu": max(cpu - self._start_cpu[direction], 0.0)}

    def system_calls(self, direction: str, size: int) -> int:
        """Count those of two passes and of one; the difference is free of fio's start and end."""
        once, twice = (system_calls.of_command(self._command(direction, passes * size)) for passes in (1, 2))
        return twice - once

    def check(self) -> Iterator[str]:
        """Every run was checked already, as far as fio can be."""
        yield f"same work: {self.name} has moved every block by its own count; its bytes are not compared"

    def close(self) -> None:
        """Do nothing: no process outlives its run."""

    def _command(self, direction: str, size: int) -> list[str]:
        return [*self._base, f"--rw={direction}", f"--io_size={size // self._threads}"]

    def _cpu_of_start(self, direction: str) -> float:
        return statistics.median(self._run(direction, BLOCK * self._threads)[1] for _ in range(_START_RUNS))

    def _run(self, direction: str, size: int) -> tuple[dict[str, Any], float]:
        """Return fio's report of its one job, and the processor seconds of the whole process."""
        before = cpu_seconds(resource.RUSAGE_CHILDREN)
        (job,) = _run(self.name, self._command(direction, size), {direction: size})
        return job, cpu_seconds(resource.RUSAGE_CHILDREN) - before


class FioBothWays:
    """fio with io_uring, reading one file while it overwrites another one, the same number of bytes.

    Each direction has the whole depth in flight. That they start together is fio's care. Its buffers are in
    huge pages where glibc can: in scattered ones the kernel splits blocks, and the disk could do more.

    Raises:
        NotMeasured: fio is missing, or fails here.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._name, self._size = name, storage.size
        self._command = [_executable(), *_SAME_FOR_ALL]
        for direction in DIRECTIONS:
            path = storage.make_file(f"{name}, {direction}")
            self._command += [*_job(path, "io_uring", storage.size, DEPTH), f"--rw={direction}"]
        try:
            self.transfer()
        except FioError as error:
            raise NotMeasured(str(error)) from error

    def transfer(self) -> Phases:
        """Move all bytes in both directions; the seconds are those until the slower direction ends."""
        jobs = _run(self._name, self._command, dict.fromkeys(DIRECTIONS, self._size), _HUGE_PAGES)
        runtimes = [job[direction]["runtime"] for job, direction in zip(jobs, DIRECTIONS, strict=True)]
        if max(runtimes) == 0:
            raise FioError(f"{self._name}: {self._size} bytes take less than fio's clock shows")
        return {"transfer": max(runtimes) / 1e3}


def _executable() -> str:
    executable = shutil.which("fio")
    if executable is None:
        raise NotMeasured("fio is not installed")
    return executable


def _job(path: Path, engine: str, size: int, depth: int) -> list[str]:
    """Return the options of a job that begins here and has options of its own."""
    escaped = str(path).replace(":", r"\:")  # a colon separates names
    options = [f"--name={path.stem}", f"--filename={escaped}", f"--ioengine={engine}"]
    return [*options, f"--iodepth={depth}", f"--size={size}"]


def _run(
    name: str, command: Sequence[str], moved: dict[str, int], variables: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run fio and return the report of each job; ``moved``: the bytes of each, in order, by direction.

    Raises:
        FioError: fio failed, or moved something else.
    """
    what = " and ".join(f"{direction} {size} bytes" for direction, size in moved.items())
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
            env={**os.environ, **(variables or {})},
        )
    except subprocess.TimeoutExpired as error:
        raise FioError(f"{name} did not {what} within {_PATIENCE_S} s") from error
    if run.returncode != 0:
        words = " ".join((run.stderr.strip() or run.stdout.strip()).split())
        raise FioError(f"{name} cannot {what}: exit status {run.returncode}: {words[:300]}")
    try:
        jobs: list[dict[str, Any]] = json.loads(run.stdout)["jobs"]
        found = [
            (job["error"], job[direction]["io_bytes"], job[direction]["short_ios"])
            for job, direction in zip(jobs, moved, strict=True)
        ]
    except (ValueError, LookupError) as error:
        raise FioError(f"{name} reported something else than its jobs: {run.stdout[:300]!r}") from error
    for one, size in zip(found, moved.values(), strict=True):
        if one != (0, size, 0):
            raise FioError(f"{name}: error, bytes and short transfers are {one}, not {(0, size, 0)}")
    return jobs


def version() -> str:
    """Return fio's version as it calls itself; raises NotMeasured."""
    run = subprocess.run([_executable(), "--version"], capture_output=True, text=True, check=True)
    return run.stdout.strip()
