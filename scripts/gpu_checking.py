# SPDX-License-Identifier: Apache-2.0
"""What a check is, for gpu_check.py and its parts."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_LINES = 12


class Check(NamedTuple):
    """One question and its answer; ``detail`` says what went wrong, or what was found."""

    name: str
    passed: bool
    detail: str = ""


def all_right(name: str, wrong: list[str]) -> Check:
    """Make a check that passes when nothing is wrong."""
    return Check(name, not wrong, "; ".join(wrong[:3]))


def guarded(name: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """Yield checks; an exception among them is one that failed, under ``name``, and their end."""
    try:
        yield from checks()
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).strip().splitlines()
        yield Check(name, False, "\n    ".join(lines[-_LINES:]))


def said(check: Check) -> Check:
    """Print a check as it ends."""
    name, passed, detail = check
    print("ok    " if passed else "FAILED", name + (f": {detail}" if detail else ""), flush=True)
    return check
