# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them: parameter counts ("7e9", "7B"), shares ("0.5%"), bytes ("24GB", "24GiB")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Final

from peftds_ext.errors import ConfigError

LARGEST: Final = 10**18
"""Counts and sizes above this are refused as slips of the pen."""

_NUMBER: Final = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)(?:e([+-]?\d{1,3}))?\s*([a-z%]*)", re.IGNORECASE)
_COUNT_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTE_UNITS: Final = {
    "": 1,
    "b": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}


class Unit(str, Enum):
    """Unit in which bytes are shown: decimal gigabytes or binary gibibytes."""

    GB = "GB"
    GIB = "GiB"

    @property
    def size(self) -> int:
        """Bytes in one unit."""
        return 10**9 if self is Unit.GB else 2**30


@dataclass(frozen=True)
class Share:
    """A part of a whole: a fraction of it, or a number of elements."""

    amount: Fraction
    relative: bool

    def of(self, whole: int) -> int:
        """Return the number of elements meant; a fraction is rounded up to a whole element."""
        return -int(-self.amount * whole // 1) if self.relative else int(self.amount)


def parse_count(text: str) -> int:
    """Read a positive count such as ``"7000000000"``, ``"7e9"`` or ``"7B"`` (K, M, B, T are decimal).

    Raises:
        ConfigError: not a number, not whole, not positive, above ``LARGEST``, or with an unknown suffix.
    """
    return _whole(text, _COUNT_UNITS, "a count such as 7e9, 350M or 7B")


def parse_bytes(text: str) -> int:
    """Read a positive size such as ``"24GB"`` (10^9 bytes) or ``"24GiB"`` (2^30); without a unit, bytes.

    Raises:
        ConfigError: as for :func:`parse_count`.
    """
    return _whole(text, _BYTE_UNITS, "a size such as 24GB (decimal) or 24GiB (binary)")


def parse_share(text: str) -> Share:
    """Read a count (``"40e6"``) or a percentage of some whole (``"0.5%"``, more than 0 and at most 100).

    Raises:
        ConfigError: as for :func:`parse_count`, or a percentage outside its range.
    """
    if not text.rstrip().endswith("%"):
        return Share(Fraction(parse_count(text)), relative=False)
    value = _scaled(text, {"%": 1}, "a percentage such as 0.5%")
    if value > 100:
        raise ConfigError(f"{text!r} is more than the whole: give at most 100%")
    return Share(value / 100, relative=True)


def format_bytes(count: int, unit: Unit) -> str:
    """Return ``count`` bytes in ``unit``: up to three decimals, no trailing zeros, no name of the unit.

    What is not zero never reads as zero: below half a thousandth the text is ``"<0.001"``.
    """
    thousandths = round(Fraction(count * 1000, unit.size))
    if thousandths == 0 and count > 0:
        return "<0.001"
    whole, rest = divmod(thousandths, 1000)
    return f"{whole}.{rest:03d}".rstrip("0").rstrip(".")


def _whole(text: str, units: dict[str, int], wanted: str) -> int:
    value = _scaled(text, units, wanted)
    if value.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number: give {wanted}")
    if value > LARGEST:
        raise ConfigError(f"{text!r} is more than {LARGEST:.0e}: give {wanted}")
    return int(value)


def _scaled(text: str, units: dict[str, int], wanted: str) -> Fraction:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[4].lower() not in units:
        raise ConfigError(f"{text!r} cannot be read: give {wanted}")
    value = Fraction(match[2] + (f"e{match[3]}" if match[3] else "")) * units[match[4].lower()]
    if match[1] == "-" or value == 0:
        raise ConfigError(f"{text!r} is not positive: give {wanted}")
    return value
