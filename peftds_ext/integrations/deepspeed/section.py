# SPDX-License-Identifier: Apache-2.0
"""Finds the DeepSpeed configuration that ``deepspeed.initialize`` is going to use, and our section in it."""

from __future__ import annotations

import base64
import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peftds_ext.config import SECTION, PeftdsConfig, parse_section


def load_config(args: object, config: object, config_params: object) -> dict[str, Any] | None:
    """Return the raw configuration that ``deepspeed.initialize`` would take from these three arguments.

    The order is DeepSpeed's: ``config``, else ``config_params``, else ``args.deepscale_config`` (its
    deprecated name) or ``args.deepspeed_config``. Each may be a dict, a path to a file or a
    base64 string.

    Returns None where DeepSpeed finds no configuration or is going to refuse what it finds, so that its
    own error reaches the caller. A dict that was passed comes back as the same object: do not change it.
    """
    found = _select(args, config if config is not None else config_params)
    if isinstance(found, dict):
        return found
    if not isinstance(found, str):
        return None
    try:
        return _read_string(found)
    except (OSError, ValueError):
        return None


def read_section(raw: Mapping[str, Any]) -> PeftdsConfig:
    """Validate our section of a raw configuration; an absent section means the defaults.

    Raises:
        ConfigError: the section is not valid.
    """
    return parse_section(raw.get(SECTION, {}))


def parse_text(text: str) -> object:
    """Parse the text of a configuration file as DeepSpeed does: Hjson, of which JSON is a subset.

    Without the ``hjson`` package, which DeepSpeed requires, only JSON is understood.

    Raises:
        ValueError: the text is malformed, or a key stands twice in one object.
    """
    parsed: object = _loads()(text, object_pairs_hook=_unique)
    return parsed


def _select(args: object, config: object) -> object:
    """Choose between the configuration passed by keyword and the one in ``args``; None if there are two."""
    deepspeed_config = getattr(args, "deepspeed_config", None)
    deepscale_config = getattr(args, "deepscale_config", None)
    given = [item for item in (config, deepspeed_config, deepscale_config) if item is not None]
    return given[0] if len(given) == 1 else None


def _read_string(value: str) -> dict[str, Any] | None:
    if os.path.exists(value):  # noqa: PTH110 - Path.exists raises on a base64 string that is too long for a name
        # No encoding is named, since DeepSpeed opens the file with the locale's.
        parsed = parse_text(Path(value).read_text())
    else:
        parsed = _loads()(base64.urlsafe_b64decode(value).decode("utf-8"))
    return parsed if isinstance(parsed, dict) else None


def _loads() -> Callable[..., Any]:
    try:
        loads: Callable[..., Any] = importlib.import_module("hjson").loads
    except ImportError:
        return json.loads
    return loads


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build one object of the file; DeepSpeed, too, refuses a key that stands twice."""
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"duplicate keys: {', '.join(twice)}")
    return dict(pairs)
