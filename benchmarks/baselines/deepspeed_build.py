# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's ops need to be loaded or built, and how to say why one was not."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare_environment() -> None:
    """Choose the CPU accelerator, unless one is chosen, and let DeepSpeed find ``ninja``.

    DeepSpeed starts it by name; pip puts it beside the interpreter.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")])


def root_cause(error: BaseException) -> str:
    """Return the first line of the error that ``error`` goes back to."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
