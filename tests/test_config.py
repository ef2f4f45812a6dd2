# SPDX-License-Identifier: Apache-2.0
"""The section: defaults, refusals, and that a refusal names the key."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from peftds_ext.config import IoConfig, PeftdsConfig, parse_model, parse_section
from peftds_ext.errors import ConfigError


class _Io(BaseModel):
    model_config = ConfigDict(extra="forbid")
    queue_depth: int = 8


class _Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    io: _Io = _Io()
    maybe: _Io | None = None


def test_empty_section_is_off_and_raises_on_conflict() -> None:
    assert parse_section({}) == PeftdsConfig(enabled=False, on_conflict="error")


def test_values_are_taken_from_any_mapping() -> None:
    section = MappingProxyType({"enabled": True, "on_conflict": "stock"})
    assert parse_section(section) == PeftdsConfig(enabled=True, on_conflict="stock")


def test_result_cannot_be_changed() -> None:
    config = parse_section({"enabled": True})
    with pytest.raises(ValidationError):
        config.enabled = False  # type: ignore[misc]


@pytest.mark.parametrize("section", [None, True, "enabled", 3, [("enabled", True)]])
def test_section_must_be_an_object(section: object) -> None:
    with pytest.raises(ConfigError, match=r"^peftds_ext: expected an object"):
        parse_section(section)


@pytest.mark.parametrize("value", [1, 0, "true", "yes", None, [], 1.0])
def test_switch_takes_only_true_and_false(value: object) -> None:
    with pytest.raises(ConfigError, match=r"peftds_ext\.enabled: .*boolean"):
        parse_section({"enabled": value})


@pytest.mark.parametrize("value", ["Error", "ignore", True, None])
def test_on_conflict_takes_only_its_two_words(value: object) -> None:
    with pytest.raises(ConfigError, match=r"peftds_ext\.on_conflict: .*'error' or 'stock'"):
        parse_section({"on_conflict": value})


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"peftds_ext\.enabled.*peftds_ext\.on_conflict"):
        parse_section({"enabled": "no", "on_conflict": "no"})


def test_misspelt_key_gets_the_nearest_one_and_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_section({"enabeld": True})
    message = str(caught.value)
    assert "peftds_ext.enabeld: unknown key" in message
    assert "Did you mean peftds_ext.enabled?" in message
    assert "Known keys: enabled, on_conflict, params, optimizer, io" in message


def test_key_that_resembles_none_gets_the_list_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_section({"zzz": 1})
    assert "Did you mean" not in str(caught.value)
    assert "Known keys: enabled" in str(caught.value)


def test_key_need_not_be_a_string_to_be_refused() -> None:
    with pytest.raises(ConfigError, match=r"peftds_ext\.1: unknown key"):
        parse_section({1: True})


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"enabled": "auto"}, r"peftds_ext\.enabled"),
        ({"io": {"queue_depth": "auto"}}, r"peftds_ext\.io\.queue_depth"),
        ({"paths": ["x", "auto"]}, r"peftds_ext\.paths\[1\]"),
    ],
)
def test_auto_is_refused_at_any_depth(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .*[Ll]eave the key out"):
        parse_section(section)


@pytest.mark.parametrize("outer", ["io", "maybe"])
def test_nested_section_refuses_unknown_keys_by_their_full_name(outer: str) -> None:
    with pytest.raises(ConfigError, match=rf"s\.{outer}\.queue_dept: .*Did you mean s\.{outer}\.queue_depth"):
        parse_model(_Outer, {outer: {"queue_dept": 3}}, path="s")


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"states": "fp16"}, r"^peftds_ext\.optimizer\.states: .*'int8'"),
        ({"master": "bf16"}, r"^peftds_ext\.optimizer\.master: .*'split'"),
        ({"overlap": "yes"}, r"^peftds_ext\.optimizer\.overlap: .*boolean"),
        ({"state": "int8"}, r"optimizer\.state: unknown key\. Did you mean peftds_ext\.optimizer\.states"),
    ],
)
def test_forms_of_states_that_do_not_exist(optimizer: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_section({"optimizer": optimizer})


def test_nested_wrong_type_is_named_in_full() -> None:
    with pytest.raises(ConfigError, match=r"^s\.io\.queue_depth: .*integer"):
        parse_model(_Outer, {"io": {"queue_depth": "many"}}, path="s")


def test_nested_section_is_parsed() -> None:
    parsed = parse_model(_Outer, {"io": {"queue_depth": 3}, "maybe": None}, path="s")
    assert parsed.io.queue_depth == 3
    assert parsed.maybe is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["enabled", "on_conflict", "enable", ""]) | st.text(), _JSON))
def test_any_object_is_parsed_or_refused_with_our_error(section: dict[str, Any]) -> None:
    valid = (
        set(section) <= {"enabled", "on_conflict"}
        and isinstance(section.get("enabled", False), bool)
        and section.get("on_conflict", "error") in ("error", "stock")
    )
    if not valid:
        with pytest.raises(ConfigError, match=r"^peftds_ext\."):
            parse_section(section)
        return
    config = parse_section(section)
    assert config.enabled is section.get("enabled", False)
    assert config.on_conflict == section.get("on_conflict", "error")


def test_the_storage_engines_settings_take_sizes_as_people_write_them() -> None:
    io = parse_section(
        {"io": {"engine": "threads", "block_bytes": "2MiB", "queue_depth": 4, "checksum": "off"}}
    ).io
    assert (io.engine, io.block_bytes, io.queue_depth, io.direct, io.checksum) == (
        "threads",
        2 << 20,
        4,
        True,
        "off",
    )
    assert parse_section({}).io == IoConfig()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine", "libaio"),
        ("queue_depth", 0),
        ("queue_depth", 1025),
        ("queue_depth", True),
        ("block_bytes", 5000),
        ("block_bytes", "2GiB"),
        ("block_bytes", "many"),
        ("direct", "yes"),
        ("checksum", "last"),
    ],
)
def test_wrong_settings_of_the_storage_engine_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"peftds_ext\.io\.{key}: "):
        parse_section({"io": {key: value}})


def test_an_unknown_key_of_the_storage_engine_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean peftds_ext\.io\.queue_depth\?"):
        parse_section({"io": {"queue_dept": 4}})
