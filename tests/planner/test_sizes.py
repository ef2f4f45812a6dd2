# SPDX-License-Identifier: Apache-2.0
"""Counts, shares and sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peftds_ext.errors import ConfigError
from peftds_ext.planner.sizes import LARGEST, Unit, format_bytes, parse_bytes, parse_count, parse_share


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7e9", 7_000_000_000),
        ("7E+9", 7_000_000_000),
        ("7B", 7_000_000_000),
        ("7b", 7_000_000_000),
        ("0.5B", 500_000_000),
        ("22.713216M", 22_713_216),
        (" 350 M ", 350_000_000),
        ("1T", 10**12),
        ("1", 1),
        (".5k", 500),
    ],
)
def test_counts(text: str, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("1.5KiB", 1536),
        ("512", 512),
        ("512B", 512),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abc",
        "7G",
        "7GB",
        "1..5",
        "1e",
        "0x10",
        "nan",
        "inf",
        "1_000",
        "7e9e9",
        "7 B x",
        "0.5%",
        "\u0667\u00b2",
    ],
)
def test_what_is_no_count_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: give a count such as 7e9"):
        parse_count(text)


@pytest.mark.parametrize("text", ["24G", "24M", "24iB", "GB", "24 GB/s", "24Gb/s"])
def test_ambiguous_or_unknown_units_of_size_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="24GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-5", "not positive"),
        ("0", "not positive"),
        ("0e9", "not positive"),
        ("7.5", "not a whole number"),
        ("1e-3", "not a whole number"),
        ("1e999", "more than 1e\\+18"),
        ("2000000T", "more than 1e\\+18"),
    ],
)
def test_numbers_out_of_range_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_count(text)


def test_share_by_count_and_by_percentage() -> None:
    assert parse_share("40e6").of(7 * 10**9) == 40_000_000
    assert parse_share("0.5%").of(7 * 10**9) == 35_000_000
    assert parse_share("100 %").of(123) == 123
    assert parse_share("1%").of(101) == 2  # 1.01 elements need two


@pytest.mark.parametrize("text", ["0%", "-1%", "100.1%", "%", "5%%", "5M%"])
def test_percentages_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="%"):
        parse_share(text)


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (84 * 10**9, Unit.GB, "84"),
        (31_500_000_000, Unit.GB, "31.5"),
        (0, Unit.GB, "0"),
        (100 * 10**9, Unit.GB, "100"),
        (499_999, Unit.GB, "<0.001"),
        (1_000_000, Unit.GB, "0.001"),
        (3 * 2**29, Unit.GIB, "1.5"),
        (999_999_999, Unit.GB, "1"),
    ],
)
def test_bytes_are_shown_without_needless_digits(count: int, unit: Unit, text: str) -> None:
    assert format_bytes(count, unit) == text


@given(st.integers(1, LARGEST))
def test_a_whole_count_survives_reading(count: int) -> None:
    assert parse_count(str(count)) == count
    assert parse_bytes(f"{count}B") == count


@given(st.integers(1, 10**20), st.sampled_from(list(Unit)))
def test_shown_bytes_are_within_half_a_thousandth(count: int, unit: Unit) -> None:
    text = format_bytes(count, unit)
    shown = 0.0 if text == "<0.001" else float(text)
    assert abs(shown - count / unit.size) <= 0.0005 + 1e-9 * shown
