# SPDX-License-Identifier: Apache-2.0
"""What we take for the configuration is what ``deepspeed.initialize`` takes; it is the oracle here."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peftds_ext.config import PeftdsConfig
from peftds_ext.errors import ConfigError
from peftds_ext.integrations.deepspeed.section import load_config, parse_text, read_section

deepspeed = pytest.importorskip("deepspeed")

RAW = {"train_batch_size": 2, "peftds_ext": {"enabled": True}}
OTHER = {"train_batch_size": 4}


class _Taken(Exception):
    """Carries the configuration that DeepSpeed settled on out of ``initialize``."""


@pytest.fixture
def deepspeed_takes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the real ``deepspeed.initialize`` up to where the configuration is fixed; None if it refuses."""

    def stop(config: Any, *_: Any) -> None:
        raise _Taken(config)

    monkeypatch.setattr(deepspeed.comm, "init_distributed", lambda *_, **__: None)
    monkeypatch.setattr(deepspeed, "merge_tp_model_init_into_config", stop)

    def take(args: Any, config: Any, config_params: Any) -> Any:
        try:
            deepspeed.initialize(args, torch.nn.Linear(1, 1), config=config, config_params=config_params)
        except _Taken as taken:
            return taken.args[0]
        except (AssertionError, ValueError, OSError):
            return None
        raise AssertionError("deepspeed.initialize went past the configuration")

    return take


def _file(folder: Path, text: str) -> str:
    path = folder / "ds.json"
    path.write_text(text)
    return str(path)


def _base64(raw: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(raw).encode()).decode()


Case = Callable[[Path], tuple[Any, Any, Any]]
FOUND: dict[str, Case] = {
    "dict": lambda _: (None, RAW, None),
    "config_params": lambda _: (None, None, RAW),
    "config before config_params": lambda _: (None, RAW, OTHER),
    "path": lambda folder: (None, _file(folder, json.dumps(RAW)), None),
    "path to hjson": lambda folder: (
        None,
        _file(folder, "{\n# note\ntrain_batch_size: 2\npeftds_ext: {enabled: true,},}"),
        None,
    ),
    "base64": lambda _: (None, _base64(RAW), None),
    "base64 too long for a file name": lambda _: (None, _base64({**RAW, "note": "x" * 9000}), None),
    "args": lambda folder: (SimpleNamespace(deepspeed_config=_file(folder, json.dumps(RAW))), None, None),
    "args with a dict": lambda _: (SimpleNamespace(deepspeed_config=RAW), None, None),
    "args, old name": lambda _: (SimpleNamespace(deepscale_config=RAW), None, None),
    "args, both names, new is None": lambda _: (
        SimpleNamespace(deepscale_config=RAW, deepspeed_config=None),
        None,
        None,
    ),
    "args without a config": lambda _: (SimpleNamespace(deepspeed_config=None, local_rank=0), RAW, None),
}
REFUSED: dict[str, Case] = {
    "nothing": lambda _: (None, None, None),
    "args without anything": lambda _: (SimpleNamespace(), None, None),
    "both args and config": lambda _: (SimpleNamespace(deepspeed_config=RAW), RAW, None),
    "both args and config_params": lambda _: (SimpleNamespace(deepspeed_config=RAW), None, RAW),
    "both names in args": lambda _: (SimpleNamespace(deepspeed_config=RAW, deepscale_config=RAW), None, None),
    "old name and config": lambda _: (SimpleNamespace(deepscale_config=RAW), RAW, None),
    "path that does not exist": lambda folder: (None, str(folder / "none.json"), None),
    "path to a folder": lambda folder: (None, str(folder), None),
    "path object": lambda folder: (None, Path(_file(folder, json.dumps(RAW))), None),
    "malformed file": lambda folder: (None, _file(folder, '{"train_batch_size": 2'), None),
    "key twice": lambda folder: (None, _file(folder, '{"a": 1, "a": 2}'), None),
    "file that is not text": lambda folder: (None, _binary(folder), None),
    "string that is neither": lambda _: (None, "ds config?", None),
    "string beyond ASCII": lambda _: (None, "konfig-ä", None),
    "other type": lambda _: (None, 7, None),
}


def _binary(folder: Path) -> str:
    path = folder / "ds.bin"
    path.write_bytes(b"\xff\xfe\x00\x81")
    return str(path)


@pytest.mark.parametrize("name", FOUND)
def test_finds_what_deepspeed_finds(name: str, tmp_path: Path, deepspeed_takes: Callable[..., Any]) -> None:
    ours = load_config(*FOUND[name](tmp_path))
    assert ours == deepspeed_takes(*FOUND[name](tmp_path))
    assert ours is not None
    assert read_section(ours) == PeftdsConfig(enabled=True)


@pytest.mark.parametrize("name", REFUSED)
def test_finds_nothing_where_deepspeed_raises(
    name: str, tmp_path: Path, deepspeed_takes: Callable[..., Any]
) -> None:
    assert load_config(*REFUSED[name](tmp_path)) is None
    assert deepspeed_takes(*REFUSED[name](tmp_path)) is None


@pytest.mark.parametrize("text", ['["a"]', "just words", "3"])
def test_file_that_is_no_object_gives_nothing(text: str, tmp_path: Path) -> None:
    assert load_config(None, _file(tmp_path, text), None) is None


def test_arguments_are_left_as_they_were() -> None:
    raw = copy.deepcopy(RAW)
    args = SimpleNamespace(deepscale_config=raw, deepspeed_config=None)
    found = load_config(args, None, None)
    assert found is not None
    read_section(found)
    assert raw == RAW
    assert args == SimpleNamespace(deepscale_config=raw, deepspeed_config=None)


def test_absent_section_means_off() -> None:
    assert read_section(OTHER) == PeftdsConfig(enabled=False)


def test_invalid_section_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"peftds_ext\.enable:"):
        read_section({"peftds_ext": {"enable": True}})


@pytest.mark.parametrize("section", [None, False, "on"])
def test_section_that_is_no_object_is_refused(section: object) -> None:
    with pytest.raises(ConfigError, match="expected an object"):
        read_section({"peftds_ext": section})


def test_duplicate_key_is_named() -> None:
    with pytest.raises(ValueError, match="duplicate keys: b"):
        parse_text('{"a": {"b": 1, "b": 2}}')


def test_json_is_read_without_hjson(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hjson", None)
    assert parse_text('{"a": 1}') == {"a": 1}
    with pytest.raises(ValueError):
        parse_text("{a: 1}")
