# SPDX-License-Identifier: Apache-2.0
"""What the tests of the optimizers share."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from peftds_ext import ops


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The parameters that the kernel has stepped, in order."""
    calls: list[Tensor] = []
    kernel = ops.adamw_step_

    def counted(param: Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(param)
        kernel(param, *args, **kwargs)

    monkeypatch.setattr(ops, "adamw_step_", counted)
    return calls
