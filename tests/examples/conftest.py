# SPDX-License-Identifier: Apache-2.0
"""The example scripts as modules, and runs of them in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

LAUNCHER = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"}


@pytest.fixture
def run_example(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Return a function that runs a script in ``tmp_path`` and returns its figures and its output.

    The test fails if the script does, or if it has not ended after four minutes.
    """

    def run(script: str, *arguments: str) -> tuple[dict[str, Any], str]:
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), environment.get("PYTHONPATH", "")])
        figures = tmp_path / "figures.json"
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / script), *arguments, "--json", str(figures)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(figures.read_text()), done.stdout

    return run
