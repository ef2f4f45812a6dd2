# SPDX-License-Identifier: Apache-2.0
"""What several test files share."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import peftds_ext

# The package under test must also be the one that child processes import.
_PACKAGE_PARENT = str(Path(peftds_ext.__file__).resolve().parent.parent)


_EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_own_extensions: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Let all processes of a run share what stock DeepSpeed compiles, and nobody else.

    The user's cache would be rebuilt, or locked, by runs of another environment at the same time.
    """
    if _EXTENSIONS not in os.environ:  # else somebody has set it, or this is a worker of such a run
        _own_extensions.append(tempfile.mkdtemp(prefix="torch_extensions"))
        os.environ[_EXTENSIONS] = _own_extensions[0]


def pytest_unconfigure(config: pytest.Config) -> None:
    while _own_extensions:
        del os.environ[_EXTENSIONS]
        shutil.rmtree(_own_extensions.pop(), ignore_errors=True)


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
