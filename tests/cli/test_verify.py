# SPDX-License-Identifier: Apache-2.0
"""``peftds verify`` as a user calls it: exit status, JSON, table and verdict."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from peftds_ext import _native
from peftds_ext.cli.main import app
from peftds_ext.errors import NativeLoadError
from peftds_ext.store.folder import DATA_NAME, SWAP_NAME
from peftds_ext.store.manifest import MANIFEST_NAME, Manifest, Record, write_manifest

BLOCK = 8
NAMES = ["rank0-pid1-0000000a", "rank1-pid2-0000000b"]


def _checksums(data: memoryview, block_bytes: int) -> list[int]:
    """Stand in for the checksum of the compiled core: the command does not care which it is."""
    return [zlib.crc32(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(_native, "core", lambda: SimpleNamespace(crc32c_blocks=_checksums))


def make_store(root: Path, name: str, *, keys: tuple[str, ...] = ("weight",), blocks: int = 2) -> Path:
    """Write a store of zeros: one record per key, and one that is rewritten during the run."""
    folder = root / SWAP_NAME / name
    folder.mkdir(parents=True)
    size = blocks * BLOCK
    records = [
        Record(
            key=key,
            dtype="uint8",
            shape=(size,),
            offset=index * size,
            nbytes=size,
            crc32c=None if key == "volatile" else tuple(_checksums(memoryview(bytes(size)), BLOCK)),
        )
        for index, key in enumerate((*keys, "volatile"))
    ]
    (folder / DATA_NAME).write_bytes(bytes(records[-1].end))
    manifest = Manifest(
        magic="peftds_ext.store",
        version=1,
        data_file=DATA_NAME,
        file_bytes=records[-1].end,
        block_bytes=BLOCK,
        rank=0,
        world_size=1,
        pid=1,
        host="node",
        records=tuple(records),
    )
    write_manifest(folder, manifest)
    return folder


def damage(folder: Path, position: int) -> None:
    with (folder / DATA_NAME).open("r+b") as file:
        file.seek(position)
        file.write(b"\1")


def run(*arguments: str | Path, expect: int) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    assert result.exit_code == expect, result.output
    return result.stdout, result.stderr


def run_json(path: Path, *, expect: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(path, "--json", expect=expect)[0])
    return content


def test_intact_stores(tmp_path: Path) -> None:
    for name in NAMES:
        make_store(tmp_path, name)
    output, _ = run(tmp_path, expect=0)
    assert all(name in output for name in NAMES)
    assert output.count("intact") == 2
    assert "2 store(s): every block that has a checksum is as it was written." in output
    assert "Skipped records are rewritten during the run" in output


def test_json_of_an_intact_store(tmp_path: Path) -> None:
    folder = make_store(tmp_path, NAMES[0])
    assert run_json(folder, expect=0) == {
        "ok": True,
        "stores": [
            {
                "folder": str(folder),
                "intact": True,
                "records": 2,
                "checked_records": 1,
                "checked_bytes": 16,
                "skipped": ["volatile"],
                "damage": [],
            }
        ],
    }


def test_a_damaged_block(tmp_path: Path) -> None:
    first, second = (make_store(tmp_path, name) for name in NAMES)
    damage(second, 9)
    output, _ = run(tmp_path, expect=1)
    (line,) = [line for line in output.splitlines() if "checksum 0x" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")][:4] == [
        f"{NAMES[1]}/{DATA_NAME}",
        "weight",
        "8",
        "8",
    ]
    assert "1 of 2 store(s) damaged: do not trust what was computed from them." in output
    content = run_json(tmp_path, expect=1)
    assert content["ok"] is False
    assert [(store["folder"], store["intact"]) for store in content["stores"]] == [
        (str(first), True),
        (str(second), False),
    ]
    (found,) = content["stores"][1]["damage"]
    assert found.pop("reason").startswith("checksum 0x")
    assert found == {
        "kind": "checksum",
        "path": str(second / DATA_NAME),
        "key": "weight",
        "offset": 8,
        "length": 8,
    }


def test_a_damaged_manifest(tmp_path: Path) -> None:
    folder = make_store(tmp_path, NAMES[0])
    (folder / MANIFEST_NAME).write_text("[]")
    output, _ = run(folder, expect=1)
    assert f"{NAMES[0]}/{MANIFEST_NAME}" in output
    assert "1 of 1 store(s) damaged" in output


def test_a_long_list_is_cut_in_the_table_and_whole_in_json(tmp_path: Path) -> None:
    folder = make_store(tmp_path, NAMES[0], blocks=60)
    for block in range(60):
        damage(folder, block * BLOCK)
    output, _ = run(folder, expect=1)
    assert output.count("checksum 0x") == 50
    assert "and 10 more; --json prints all" in output
    assert len(run_json(folder, expect=1)["stores"][0]["damage"]) == 60


def test_nothing_is_cut_short_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    folder = make_store(tmp_path, NAMES[0], keys=("layers.0.attention.q_proj.weight",))
    damage(folder, 0)
    output, _ = run(folder, expect=1)
    assert "…" not in output


def test_names_from_files_do_not_steer_the_terminal(tmp_path: Path) -> None:
    folder = make_store(tmp_path, NAMES[0], keys=("[bold]x\x1b[2J\n",))
    damage(folder, 0)
    output, _ = run(folder, expect=1)
    assert "\x1b" not in output
    assert "[bold]x\\x1b[2J\\n" in output


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_where_there_is_no_store_the_status_is_two(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "holds no store"),
        (tmp_path / "gone", "cannot read the folder: No such file or directory"),
        (tmp_path / "file", "cannot read the folder: Not a directory"),
    ):
        output, errors = run(path, *options, expect=2)
        assert output == ""
        assert errors.startswith("peftds: ")
        assert reason in errors
        assert str(path) in errors


def test_without_the_compiled_core_the_status_is_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeLoadError("the compiled core is not built")

    monkeypatch.setattr(_native, "core", missing)
    output, errors = run(make_store(tmp_path, NAMES[0]), expect=2)
    assert output == ""
    assert "not built" in errors
