# SPDX-License-Identifier: Apache-2.0
"""What several test files share."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import peftds_ext

# The package under test must also be the one that child processes import.
_PACKAGE_PARENT = str(Path(peftds_ext.__file__).resolve().parent.parent)


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Return a function that runs code in a fresh interpreter and returns its standard output.

    Environment variables are given as keywords. The test fails if the interpreter does, or if it
    has not ended after four minutes: imports of torch can be slow.
    """

    def run(code: str, **environment: str) -> str:
        paths = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
        inherited = {key: value for key, value in os.environ.items() if key != "PEFTDS_CPU_ISA"}
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and what it forked have ended, as they should
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.returncode == 0, f"exit status {process.returncode}\n{output}\n{errors}"
        return output

    return run
