# SPDX-License-Identifier: Apache-2.0
"""Tests against DeepSpeed in processes of its own."""

from ds_fixtures import measured, pytest_terminal_summary, runner

__all__ = ["measured", "pytest_terminal_summary", "runner"]
