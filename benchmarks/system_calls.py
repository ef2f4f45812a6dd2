# SPDX-License-Identifier: Apache-2.0
"""Counts system calls with strace, without privileges: of this process, or of a command."""

from __future__ import annotations

import ctypes
import functools
import os
import selectors
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from interleave import NotMeasured

_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)
_PATIENCE_S = 60.0


def of_command(command: Sequence[str]) -> int:
    """Run ``command`` to its end; return the system calls of it, its threads and its children.

    Raises:
        NotMeasured: strace is missing or may not trace, or the command failed.
    """
    with _summary() as (strace, output):
        try:
            run = subprocess.run(
                [*strace, *command], capture_output=True, text=True, check=False, timeout=_PATIENCE_S
            )
        except subprocess.TimeoutExpired as error:
            raise NotMeasured(f"under strace {command[0]} did not end within {_PATIENCE_S} s") from error
        if run.returncode != 0:
            raise NotMeasured(f"under strace {command[0]} failed: {_first_line(run.stderr)}")
        return _total(output)


def of_this_process(work: Callable[[], object]) -> int:
    """Call ``work``; return the system calls that all threads of this process made for it, to within a few.

    Raises:
        NotMeasured: strace is missing or may not trace.
    """
    return max(_traced(work) - _of_tracing(), 0)


@functools.cache
def _of_tracing() -> int:
    """Return the system calls that the start and the end of tracing make themselves."""
    return _traced(lambda: None)


def _traced(work: Callable[[], object]) -> int:
    with _summary() as (strace, output), _may_be_traced():
        tracer = subprocess.Popen([*strace, "-p", str(os.getpid())], stderr=subprocess.PIPE, text=True)
        try:
            _wait_until_attached(tracer)
            work()
        finally:
            tracer.send_signal(signal.SIGINT)  # it lets go, and writes its summary
            tracer.communicate()
        return _total(output)


@contextmanager
def _summary() -> Iterator[tuple[list[str], Path]]:
    """Give strace's command line without its target, and the file that its summary goes to."""
    strace = shutil.which("strace")
    if strace is None:
        raise NotMeasured("strace is not installed")
    with TemporaryDirectory() as folder:
        output = Path(folder) / "summary"
        yield [strace, "-f", "-c", "-o", str(output)], output


@contextmanager
def _may_be_traced() -> Iterator[None]:
    """Let a child trace this process, which Yama's default forbids. Without Yama the call does nothing."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def _wait_until_attached(tracer: subprocess.Popen[str]) -> None:
    assert tracer.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(tracer.stderr, selectors.EVENT_READ)
        if not selector.select(_PATIENCE_S):
            raise NotMeasured(f"strace did not attach within {_PATIENCE_S} s")
    line = tracer.stderr.readline().strip()
    if "attached" not in line:
        raise NotMeasured(f"strace may not trace: {line}")


def _total(output: Path) -> int:
    """Read the calls from the last line of a summary: share, seconds, seconds per call, calls, ..."""
    lines = output.read_text().splitlines() if output.exists() else []
    words = lines[-1].split() if lines else []
    if len(words) < 5 or words[-1] != "total":
        raise NotMeasured("strace wrote no summary")
    return int(words[3])


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no message")
