# SPDX-License-Identifier: Apache-2.0
"""Tests of the scripts."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmarks", "tests/stream")]
