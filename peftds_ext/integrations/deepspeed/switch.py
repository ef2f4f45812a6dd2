# SPDX-License-Identifier: Apache-2.0
"""Whether the engine is on where DeepSpeed builds something of its own accord."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

from peftds_ext.integrations.deepspeed.conflicts import check_conflicts, find_conflicts
from peftds_ext.integrations.deepspeed.section import read_section

_enabled: contextvars.ContextVar[bool] = contextvars.ContextVar("peftds_engine_enabled", default=False)


@contextlib.contextmanager
def engine_enabled() -> Iterator[None]:
    """Inside this, an engine is being made whose configuration has switched ours on."""
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def is_engine_enabled() -> bool:
    """Whether this runs inside :func:`engine_enabled`."""
    return _enabled.get()


def wants_engine(raw: Mapping[str, Any]) -> bool:
    """Whether the engine is on for a configuration, also before ``deepspeed.initialize`` (``zero.Init``).

    Raises:
        ConfigError: our section is not valid.
        ConflictError: another DeepSpeed feature excludes the engine.
    """
    if is_engine_enabled():
        return True
    section = read_section(raw)
    if not section.enabled:
        return False
    if section.on_conflict == "stock":  # deepspeed.initialize is going to say so, once
        return not find_conflicts(raw)
    return check_conflicts(raw, section)
