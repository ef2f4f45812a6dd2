# SPDX-License-Identifier: Apache-2.0
"""Training on disks and machines that fail, by the tools of the tests that train on good ones."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

from ds_fixtures import measured, pytest_terminal_summary, runner

__all__ = ["measured", "pytest_terminal_summary", "runner"]
