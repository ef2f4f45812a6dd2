# SPDX-License-Identifier: Apache-2.0
"""Compiled offload engine for parameter-efficient fine-tuning with DeepSpeed ZeRO.

Importing the package registers the operators ``torch.ops.peftds_ext.*``. It starts no thread and
imports neither DeepSpeed nor any other optional package; everything else is loaded on first use.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from peftds_ext.errors import NativeLoadError

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed import from_pretrained, initialize, install, stats, uninstall
    from peftds_ext.optim.adamw import FusedAdamW

__version__ = "0.1.0"
__all__ = ["FusedAdamW", "__version__", "from_pretrained", "initialize", "install", "stats", "uninstall"]

_LAZY = {
    "FusedAdamW": "peftds_ext.optim.adamw",
    "from_pretrained": "peftds_ext.integrations.deepspeed",
    "initialize": "peftds_ext.integrations.deepspeed",
    "install": "peftds_ext.integrations.deepspeed",
    "stats": "peftds_ext.integrations.deepspeed",
    "uninstall": "peftds_ext.integrations.deepspeed",
}

# Without the core everything that needs it raises this again, with the same message; `peftds doctor`
# and `peftds plan` must still run, the first to explain it.
with contextlib.suppress(NativeLoadError):
    from peftds_ext import ops as ops


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "ops":  # only when it could not be imported above: says again why
        return importlib.import_module("peftds_ext.ops")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
