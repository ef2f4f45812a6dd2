# SPDX-License-Identifier: Apache-2.0
"""Tests against DeepSpeed in processes of its own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "stream"))

from ds_fixtures import measured, pytest_terminal_summary, runner

__all__ = ["measured", "pytest_terminal_summary", "runner"]
