# SPDX-License-Identifier: Apache-2.0
"""The parent's side of :mod:`engine_worker`: one process per contender, of which one at a time works."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from interleave import NotMeasured, Phases
from torch import Tensor

ENGINE_WORKER = Path(__file__).with_name("engine_worker.py")
_LOG_TAIL = 4000


class WorkerError(RuntimeError):
    """A worker died, answered nonsense, or not in time; the message ends with the tail of its log."""


class EngineProcess:
    """A running worker. Use it in a ``with`` statement: leaving it ends the process.

    Args:
        name: names the log file ``<folder>/<name>.log``, and the worker in messages.
        arguments: the worker's command line.
        folder: an existing folder for the log and the saved weights.
        timeout_s: longest wait for one answer.
        worker: the worker's script.

    Raises:
        NotMeasured: the contender cannot run here.
        WorkerError: it should have run, and did not.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        *,
        timeout_s: float,
        worker: Path = ENGINE_WORKER,
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._folder = folder
        self._timeout_s = timeout_s
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(worker), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        try:
            started = self._answer()
            if "not_measured" in started:
                raise NotMeasured(started["not_measured"])
        except BaseException:
            self.close()
            raise

    def run(self, command: str = "round") -> Phases:
        """Let the worker do one round and return its seconds per phase."""
        phases: Phases = self._ask(command)["phases"]
        return phases

    def weight(self) -> Tensor:
        """Return the present bf16 weight."""
        path = self._folder / f"{self.name}.pt"
        self._ask(f"save {path}")
        weight: Tensor = torch.load(path)
        path.unlink()
        return weight

    def answer(self, command: str) -> dict[str, Any]:
        """Return all that the worker answers to a command."""
        return self._ask(command)

    def ask(self, command: str) -> Any:
        """Return what the worker answers to a command of its own, under the command's name."""
        return self._ask(command)[command]

    def messages(self) -> list[str]:
        """Return what the package under test has logged in the worker."""
        messages: list[str] = self._ask("messages")["messages"]
        return messages

    def close(self) -> None:
        """End the process: kindly first. Safe to call twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure(f"has ended before {command!r}") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._timeout_s):
                raise self._failure(f"did not answer within {self._timeout_s} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended without an answer")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise self._failure(f"answered {line!r}, which is not JSON") from error
        return answer

    def _failure(self, what: str) -> WorkerError:
        tail = self._log.read_text(errors="replace")[-_LOG_TAIL:]
        return WorkerError(f"benchmark worker {self.name!r} {what}; the end of its log:\n{tail}")
