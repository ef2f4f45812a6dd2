# SPDX-License-Identifier: Apache-2.0
"""What is said of a DeepSpeed configuration file, and how much it weighs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peftds_ext.cli import config_checks
from peftds_ext.cli.checks import Check
from peftds_ext.store.media import Location, Media


def _write(folder: Path, raw: object) -> Path:
    path = folder / "ds.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path


def _only(found: Any) -> Check:
    (check,) = list(found)
    return check


def _config(path: Path) -> dict[str, Check]:
    return {check.name: check for check in config_checks.check_config_file(path)}


def test_good_configuration(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    path = _write(tmp_path, {"zero_optimization": zero, "peftds_ext": {"enabled": True}})
    found = _config(path)
    assert [check.status for check in found.values()] == ["ok", "ok"]
    assert found["section peftds_ext"].value == "enabled"


@pytest.mark.parametrize(
    ("zero", "status", "words"),
    [
        ("x", "error", "not an object"),
        ({"stage": 3}, "warning", "nothing to do"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "warning", "nothing to do"),
        (True, "warning", "nothing to do"),
    ],
)
def test_engine_with_nothing_to_do(zero: object, status: str, words: str, tmp_path: Path) -> None:
    path = _write(tmp_path, {"zero_optimization": zero, "peftds_ext": {"enabled": True}})
    check = _config(path)["zero_optimization"]
    assert check.status == status
    assert words in check.value


@pytest.mark.parametrize("name", ["peftds-ext", "peftds_exit", "peft_ds_ext"])
def test_misspelt_section_is_a_warning(name: str, tmp_path: Path) -> None:
    check = _config(_write(tmp_path, {name: {"enabled": True}}))["section peftds_ext"]
    assert check.status == "warning"
    assert f'"{name}"' in check.value


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"a": 1', "not JSON"), ('{"a": 1, "a": 2}', "duplicate keys: a"), ("[1, 2]", "not a JSON object")],
)
def test_malformed_file_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    check = _only(config_checks.check_config_file(_write(tmp_path, text)))
    assert check.status == "error"
    assert words in check.value


def test_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        check = _only(config_checks.check_config_file(path))
        assert check.status == "error"
        assert str(path) in check.value


def test_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ds.bin"
    path.write_bytes(b"\xff\xfe\x00\x81")
    assert _only(config_checks.check_config_file(path)).status == "error"


def test_hjson_is_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    found = _config(_write(tmp_path, "{\n# ours\npeftds_ext: {enabled: true}}"))
    assert found["configuration file"].status == "note"
    assert found["section peftds_ext"].status == "ok"


@pytest.mark.parametrize(
    ("raw", "word"), [({}, "absent"), ({"peftds_ext": {"enabled": False}}, "disabled")], ids=["absent", "off"]
)
def test_section_that_is_off_is_a_note(raw: dict[str, Any], word: str, tmp_path: Path) -> None:
    check = _config(_write(tmp_path, raw))["section peftds_ext"]
    assert check.status == "note"
    assert word in check.value
    assert '"enabled": true' in check.remedy


def test_unknown_key_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    check = _config(_write(tmp_path, {"peftds_ext": {"enable": True}}))["section peftds_ext"]
    assert check.status == "error"
    assert "Did you mean peftds_ext.enabled?" in check.value


@pytest.mark.parametrize(
    ("section", "status"),
    [
        ({"enabled": True}, "error"),
        ({"enabled": True, "on_conflict": "stock"}, "warning"),
        ({"enabled": False}, "note"),
        ({"enabled": "yes"}, "error"),
    ],
    ids=str,
)
def test_conflict_weighs_what_it_leads_to(section: dict[str, Any], status: str, tmp_path: Path) -> None:
    raw = {"zero_optimization": {"stage": 3, "zenflow": {}}, "peftds_ext": section}
    check = _config(_write(tmp_path, raw))["zero_optimization.zenflow"]
    assert check.status == status
    assert check.remedy


@pytest.mark.parametrize(
    ("raw", "pinned"),
    [
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, True),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}, False),
        ({"zero_optimization": {"offload_param": {"device": "nvme", "pin_memory": True}}}, True),
        ({"zero_optimization": {"offload_param": {"device": "none"}}}, False),
        ({"zero_optimization": {"offload_param": None}}, False),
        ({"zero_optimization": True}, False),
        ({}, False),
        ("not a configuration", True),
    ],
    ids=str,
)
def test_pinned_offload_is_read_from_the_file(raw: object, pinned: bool, tmp_path: Path) -> None:
    assert config_checks.reads_pinned(_write(tmp_path, raw)) is pinned


def test_pinned_offload_is_the_default_without_a_file() -> None:
    assert config_checks.reads_pinned(None) is True


def nvme(path: object, **more: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": path, **more.pop("offload", {})}
    return {
        "zero_optimization": {"stage": 3, more.pop("what", "offload_param"): offload},
        "peftds_ext": {"enabled": True},
        **more,
    }


KEY = "zero_optimization.offload_param.nvme_path"
both = pytest.mark.parametrize("what", ["offload_param", "offload_optimizer"])


@both
def test_the_folder_is_described(tmp_path: Path, what: str) -> None:
    check = _config(_write(tmp_path, nvme(str(tmp_path), what=what)))[f"zero_optimization.{what}.nvme_path"]
    assert check.status in ("ok", "warning")
    assert str(tmp_path) in check.value
    assert "free" in check.value


def test_missing_folder_is_a_note_and_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "locate", lambda folder: Location("ext4", Media.FLASH))
    check = _config(_write(tmp_path, nvme(str(tmp_path / "a" / "b"))))[KEY]
    assert check.status == "note"
    assert f"made below {tmp_path}" in check.value
    assert not (tmp_path / "a").exists()


def test_memory_as_a_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "locate", lambda folder: Location("tmpfs", Media.MEMORY))
    check = _config(_write(tmp_path, nvme(str(tmp_path))))[KEY]
    assert check.status == "warning"
    assert "the host's memory" in check.value


@both
@pytest.mark.parametrize("path", [None, ""])
def test_no_folder_is_an_error(path: object, tmp_path: Path, what: str) -> None:
    check = _config(_write(tmp_path, nvme(path, what=what)))[f"zero_optimization.{what}.nvme_path"]
    assert check.status == "error"
    assert "missing" in check.value


def test_a_file_as_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert _config(_write(tmp_path, nvme(str(tmp_path / "file"))))[KEY].status == "error"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (nvme("/", offload={"buffer_count": "many"}), "buffer_count"),
        (nvme("/", aio={"block_size": "1MB"}), "aio.block_size"),
        (nvme("/", aio={"queue_depth": 0.5}), "aio.queue_depth"),
    ],
)
def test_numbers_that_the_storage_engine_cannot_use_are_errors(
    raw: dict[str, Any], words: str, tmp_path: Path
) -> None:
    check = _config(_write(tmp_path, raw))["storage numbers"]
    assert check.status == "error"
    assert words in check.value


@pytest.mark.parametrize("stated", [{"states": "int8"}, {"master": "split"}])
def test_a_form_of_states_that_are_not_offloaded_is_an_error(tmp_path: Path, stated: dict[str, str]) -> None:
    raw = nvme(str(tmp_path), peftds_ext={"enabled": True, "optimizer": stated})
    check = _config(_write(tmp_path, raw))["peftds_ext.optimizer"]
    assert check.status == "error"
    assert "the optimizer is not offloaded" in check.value
    raw["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert "peftds_ext.optimizer" not in _config(_write(tmp_path, raw))


def test_the_word_auto_for_buffers_is_none_of_ours(tmp_path: Path) -> None:
    found = _config(_write(tmp_path, nvme(str(tmp_path), offload={"buffer_count": "auto"})))
    assert "storage numbers" not in found


@pytest.mark.parametrize(
    ("change", "key", "status"),
    [
        ({"params": {"source": "checkpoint"}}, "peftds_ext.params.source", "note"),
        ({"trace": "missing/trace.json"}, "peftds_ext.trace", "error"),
        ({"trace": "."}, "peftds_ext.trace", "error"),
    ],
)
def test_source_and_trace(
    change: dict[str, Any], key: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    zero: dict[str, Any] = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    raw = {"zero_optimization": zero, "peftds_ext": {"enabled": True, **change}}
    assert _config(_write(tmp_path, raw))[key].status == status
    if key.endswith("source"):
        zero["offload_param"] = {"device": "cpu"}
        assert _config(_write(tmp_path, raw))[key].status == "error"


def test_a_trace_that_can_be_written_is_no_finding(tmp_path: Path) -> None:
    raw = {"peftds_ext": {"enabled": True, "trace": str(tmp_path / "trace.json")}}
    assert "peftds_ext.trace" not in _config(_write(tmp_path, raw))
