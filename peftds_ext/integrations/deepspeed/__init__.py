# SPDX-License-Identifier: Apache-2.0
"""The plug into DeepSpeed: ``install``, ``uninstall``, ``initialize``, ``from_pretrained``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed.from_checkpoint import from_pretrained
    from peftds_ext.integrations.deepspeed.plug import initialize, install, uninstall

__all__ = ["from_pretrained", "initialize", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    # Late, so that the parts that need no compiled core can be used without it.
    if name == "from_pretrained":
        from peftds_ext.integrations.deepspeed import from_checkpoint

        return from_checkpoint.from_pretrained
    if name in __all__:
        from peftds_ext.integrations.deepspeed import plug

        return getattr(plug, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
