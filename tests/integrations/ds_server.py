# SPDX-License-Identifier: Apache-2.0
"""A process that has DeepSpeed, Transformers and PEFT loaded and forks one child per training run.

DeepSpeed keeps much of its state in the process, so every engine gets a process of its own; importing
everything for each of them would take most of the time of the tests. Requests and replies are one line
of JSON each; the jobs of a request all run at once.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PRELOAD = (
    "deepspeed",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers",
    "peft",
    "accelerate",
    "pytest",
    "ds_worker",
)


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    for name in PRELOAD:
        importlib.import_module(name)
    # What the imports allocated is not collected in the children, which would copy its pages.
    importlib.import_module("gc").freeze()
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), file=replies, flush=True)


def _serve(request: dict[str, Any]) -> list[dict[str, Any]]:
    children = {_fork(job): job for job in request["jobs"]}
    deadline = time.monotonic() + request["timeout"]
    outcomes: dict[int, int | None] = {}
    while len(outcomes) < len(children):
        for child in children:
            if child in outcomes:
                continue
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                outcomes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                outcomes[child] = None
        time.sleep(0.005)
    return [{"exit": outcomes[child], "job": job} for child, job in children.items()]


def _fork(job: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _redirect(job["log"])
        os.environ.update(job["env"])
        importlib.import_module("ds_worker").execute(job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # as an interpreter's end would; os._exit does not
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(log, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    main()
