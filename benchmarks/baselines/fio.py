# SPDX-License-Identifier: Apache-2.0
"""fio, with the same file size, block and depth as ours. It keeps its own time; a run is a process."""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from typing import Any

import system_calls
from interleave import NotMeasured, Phases
from storage import BLOCK, DEPTH, DIRECTIONS, Storage, cpu_seconds

ENGINES = {"fio io_uring": "io_uring", "fio threads": "psync", "fio libaio": "libaio"}
"""fio's engine by the name of the subject. psync has one transfer in flight: as many threads as the depth
share the file, each with a part of its own. (fio can also let them take turns at one stream, by
``--io_submit_mode=offload``; but of such runs of 3.33 some never end.)"""

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
        executable = shutil.which("fio")
        if executable is None:
            raise NotMeasured("fio is not installed")
        path = str(storage.make_file(name)).replace(":", r"\:")  # a colon separates names
        self._threads = DEPTH if ENGINES[name] == "psync" else 1
        part = storage.size // self._threads
        self._base = [
            executable, f"--name={name}", f"--filename={path}", f"--ioengine={ENGINES[name]}",
            f"--bs={BLOCK}", f"--iodepth={DEPTH // self._threads}", f"--numjobs={self._threads}", "--thread",
            f"--size={part}", f"--offset_increment={part}", "--group_reporting", "--direct=1",
            # What costs fio time and is no part of the transfer.
            "--scramble_buffers=0", "--disk_util=0", "--invalidate=0", "--output-format=json",
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
        try:
            run = subprocess.run(
                self._command(direction, size),
                capture_output=True,
                text=True,
                check=False,
                timeout=_PATIENCE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise FioError(f"{self.name} did not {direction} {size} bytes within {_PATIENCE_S} s") from error
        cpu = cpu_seconds(resource.RUSAGE_CHILDREN) - before
        if run.returncode != 0:
            words = " ".join((run.stderr.strip() or run.stdout.strip()).split())
            raise FioError(f"{self.name} cannot {direction}: exit status {run.returncode}: {words[:300]}")
        return self._checked(direction, size, run.stdout), cpu

    def _checked(self, direction: str, size: int, output: str) -> dict[str, Any]:
        try:
            job: dict[str, Any] = json.loads(output)["jobs"][0]
            found = (job["error"], job[direction]["io_bytes"], job[direction]["short_ios"])
        except (ValueError, LookupError) as error:
            raise FioError(f"{self.name} reported something else than a job: {output[:300]!r}") from error
        if found != (0, size, 0):
            raise FioError(f"{self.name}: error, bytes and short transfers are {found}, not {(0, size, 0)}")
        return job


def version() -> str:
    """Return fio's version as it calls itself; raises NotMeasured."""
    executable = shutil.which("fio")
    if executable is None:
        raise NotMeasured("fio is not installed")
    run = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True)
    return run.stdout.strip()
