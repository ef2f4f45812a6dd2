# SPDX-License-Identifier: Apache-2.0
"""The plug into DeepSpeed: ``install``, ``uninstall``, ``initialize``, ``from_pretrained``, ``stats``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed.from_checkpoint import from_pretrained
    from peftds_ext.integrations.deepspeed.plug import initialize, install, uninstall
    from peftds_ext.integrations.deepspeed.stage3_layers import stats

__all__ = ["from_pretrained", "initialize", "install", "stats", "uninstall"]


def __getattr__(name: str) -> Any:
    # Late, so that the parts that need no compiled core can be used without it.
    if name in __all__:
        part = {"from_pretrained": "from_checkpoint", "stats": "stage3_layers"}.get(name, "plug")
        return getattr(importlib.import_module(f"{__name__}.{part}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
