# SPDX-License-Identifier: Apache-2.0
"""What the tests of streams share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from streamed_models import make_engine

from peftds_ext.store.engine import StorageEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageEngine]:
    monkeypatch.delenv("PEFTDS_IO_FAULTS", raising=False)
    engine = make_engine()
    yield engine
    engine.close()
