# SPDX-License-Identifier: Apache-2.0
"""What several tests of the compiled core share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from peftds_ext import _native


@pytest.fixture
def engine() -> Iterator[Any]:
    made = _native.core().Engine()
    yield made
    made.close()
