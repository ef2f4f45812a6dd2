# SPDX-License-Identifier: Apache-2.0
"""Tests with several ranks, by the tools of the tests with one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
sys.path.insert(0, str(Path(__file__).parents[1] / "stream"))

from ds_fixtures import measured, pytest_terminal_summary, runner

__all__ = ["measured", "pytest_terminal_summary", "runner"]
