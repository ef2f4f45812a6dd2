# SPDX-License-Identifier: Apache-2.0
"""The tests' side of ``ds_server``: starts it, sends it scenarios, and returns what they returned."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import peftds_ext

HERE = Path(__file__).parent
PACKAGE_PARENT = Path(peftds_ext.__file__).parents[1]
"""The package under test must also be the one that child processes import."""


@dataclass(frozen=True)
class Outcome:
    """What one process left."""

    result: Any
    log: list[tuple[str, str]]
    """Level and text of what the logger ``peftds_ext`` was given, from INFO on."""
    output: str
    """Standard output and standard error."""

    def said(self, text: str) -> int:
        """Count the log's messages that contain ``text``."""
        return sum(text in message for _, message in self.log)


class ScenarioFailed(AssertionError):
    """A scenario raised, or did not end in time."""


class Runner:
    """Runs scenarios, each rank in a process of its own."""

    def __init__(self, tmp: Path, env: dict[str, str] | None = None) -> None:
        self._tmp = tmp
        self._number = itertools.count()
        self._errors = (tmp / "server.log").open("w")
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "ds_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(**(env or {})),
            text=True,
        )

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._errors.close()

    def run(
        self,
        scenario: Callable[..., Any],
        *modes: str,
        adam: str = "torch_adam",
        world: int = 1,
        env: dict[str, str] | None = None,
        timeout: float = 240,
        tmp: Path | None = None,
        **arguments: Any,
    ) -> list[list[Outcome]]:
        """Run a scenario at once in each mode ("ours", "stock", "bare"); return outcomes by mode and rank.

        "bare" neither installs the engine nor changes DeepSpeed. Arguments must survive JSON.
        """
        jobs = []
        for mode in modes:
            port = str(free_port())
            for rank in range(world):
                folder = self._tmp / str(next(self._number))
                folder.mkdir()
                jobs.append(
                    {
                        "scenario": f"{scenario.__module__}:{scenario.__qualname__}",
                        "arguments": arguments,
                        "mode": mode,
                        "adam": adam,
                        "rank": rank,
                        "world": world,
                        "tmp": str(tmp or folder),
                        "out": str(folder / "result.pt"),
                        "log": str(folder / "log.txt"),
                        "env": {
                            "MASTER_PORT": port,
                            "RANK": str(rank),
                            "LOCAL_RANK": str(rank),
                            "WORLD_SIZE": str(world),
                            **(env or {}),
                        },
                    }
                )
        outcomes = [self._outcome(reply) for reply in self._ask({"jobs": jobs, "timeout": timeout})]
        return [outcomes[i : i + world] for i in range(0, len(outcomes), world)]

    def one(self, scenario: Callable[..., Any], mode: str = "ours", **options: Any) -> Outcome:
        """Run a scenario in one mode with one rank."""
        return self.run(scenario, mode, **options)[0][0]

    def pair(self, scenario: Callable[..., Any], **options: Any) -> tuple[Outcome, Outcome]:
        """Run a scenario with the engine and with stock DeepSpeed, with one rank."""
        ours, stock = self.run(scenario, "ours", "stock", **options)
        return ours[0], stock[0]

    def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise ScenarioFailed("the server ended:\n" + (self._tmp / "server.log").read_text()[-3000:])
        replies: list[dict[str, Any]] = json.loads(line)
        return replies

    def _outcome(self, reply: dict[str, Any]) -> Outcome:
        job = reply["job"]
        output = Path(job["log"]).read_text(errors="replace")
        if reply["exit"] != 0:
            what = "did not end in time" if reply["exit"] is None else f"ended with {reply['exit']}"
            raise ScenarioFailed(
                f"{job['scenario']} ({job['mode']}, rank {job['rank']}) {what}:\n{output[-4000:]}"
            )
        saved = torch.load(job["out"], weights_only=False)
        return Outcome(saved["result"], saved["log"], output)


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a process that trains on the CPU, alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PEFTDS_", "ACCELERATE_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(PACKAGE_PARENT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # DeepSpeed compiles its Muon, which takes a compiler and a minute
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        **changes,
    }


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def compiler_missing() -> str:
    """Return what DeepSpeed's run-time compilation lacks on this machine, or ""."""
    path = environment()["PATH"]
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=path) is None]
    return f"DeepSpeed's own cpu_adam cannot be compiled: no {' and no '.join(missing)}" if missing else ""
