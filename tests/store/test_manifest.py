# SPDX-License-Identifier: Apache-2.0
"""What a manifest must hold, that it is written whole or not at all, and that bad ones are told apart."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from peftds_ext.errors import CorruptDataError, StorageError, StorageFullError
from peftds_ext.store import manifest as module
from peftds_ext.store.manifest import (
    ITEM_BYTES,
    MANIFEST_NAME,
    Manifest,
    Record,
    is_temporary_name,
    read_manifest,
    write_manifest,
)

FIRST = {"key": "a", "dtype": "bfloat16", "shape": [3, 2], "offset": 0, "nbytes": 12, "crc32c": [1, 2]}
SECOND = {"key": "b", "dtype": "float32", "shape": [], "offset": 16, "nbytes": 4, "crc32c": None}
VALID: dict[str, Any] = {
    "magic": "peftds_ext.store",
    "version": 1,
    "data_file": "data.bin",
    "file_bytes": 20,
    "block_bytes": 8,
    "rank": 1,
    "world_size": 2,
    "pid": 77,
    "host": "node",
    "records": [FIRST, SECOND],
}


def read_bytes(content: bytes) -> Manifest:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST_NAME).write_bytes(content)
        return read_manifest(Path(folder))


def read_changed(**changes: object) -> Manifest:
    return read_bytes(json.dumps({**VALID, **changes}).encode())


def read_record(**changes: object) -> Manifest:
    return read_changed(records=[{**FIRST, **changes}, SECOND])


# what is valid


def test_a_manifest_reads_as_it_was_written(tmp_path: Path) -> None:
    written = Manifest.model_validate(VALID)
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    assert written.records[0].shape == (3, 2)
    assert written.records[0].end == 12
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    block_bytes = draw(st.integers(1, 50))
    keys = draw(st.lists(st.text(), max_size=4, unique=True))
    records: list[Record] = []
    offset = 0
    for key in keys:
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        blocks = math.ceil(nbytes / block_bytes)
        sums = st.lists(st.integers(0, 2**32 - 1), min_size=blocks, max_size=blocks).map(tuple)
        offset += draw(st.integers(0, 10))
        crc32c = draw(st.none() | sums)
        records.append(Record(key=key, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, crc32c=crc32c))
        offset += nbytes
    return Manifest(
        magic="peftds_ext.store",
        version=1,
        data_file="data.bin",
        file_bytes=offset,
        block_bytes=block_bytes,
        rank=0,
        world_size=1,
        pid=1,
        host=draw(st.text()),
        records=tuple(draw(st.permutations(records))),
    )


@given(manifests())
@settings(max_examples=50, deadline=None)
def test_whatever_can_be_constructed_can_be_read_back(written: Manifest) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder), written)
        assert read_manifest(Path(folder)) == written


def test_element_sizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


def test_models_are_frozen() -> None:
    manifest = Manifest.model_validate(VALID)
    with pytest.raises(ValidationError):
        manifest.rank = 0
    with pytest.raises(ValidationError):
        manifest.records[0].offset = 1


def test_an_empty_record_may_lie_anywhere_in_the_file() -> None:
    empty = {"key": "none", "dtype": "int8", "shape": [0], "offset": 4, "nbytes": 0, "crc32c": []}
    assert len(read_changed(records=[FIRST, SECOND, empty]).records) == 3
    with pytest.raises(CorruptDataError, match=r"'none'.* ends at byte 21, the file at 20"):
        read_changed(records=[FIRST, {**empty, "offset": 21}])


# what is refused, and that the message names it


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"offset": -4}, "record 'a': offset: .*greater than or equal to 0, got -4"),
        ({"nbytes": -12, "shape": [-6]}, "record 'a': shape.0: .*got -6"),
        ({"offset": 9}, "record 'a': ends at byte 21, the file at 20"),
        ({"offset": 2**63}, "record 'a': offset: "),
        ({"offset": 6}, "record 'b': starts at byte 16, inside record 'a', which ends at 18"),
        ({"key": "b"}, "record 'b': there are two of this key"),
        ({"key": 7}, "record number 0: key: .*valid string, got 7"),
        ({"nbytes": 11}, "record 'a': 11 bytes, but bfloat16 of its shape has 12"),
        ({"dtype": "float32"}, "record 'a': 12 bytes, but float32 of its shape has 24"),
        ({"dtype": "nn"}, "record 'a': dtype: no dtype that this build knows, got 'nn'"),
        ({"shape": [1] * 65}, "record 'a': shape: "),
        ({"shape": [2**62] * 64}, "record 'a': 12 bytes, but bfloat16 of its shape has [0-9]+\\.\\.\\."),
        ({"shape": [3.5, 2]}, "record 'a': shape.0: "),
        ({"nbytes": "12"}, "record 'a': nbytes: .*got '12'"),
        ({"crc32c": [1]}, "record 'a': 1 checksums for 2 blocks of 8 bytes"),
        ({"crc32c": [1, 2, 3]}, "record 'a': 3 checksums for 2 blocks of 8 bytes"),
        ({"crc32c": [1, 2**32]}, "record 'a': crc32c.1: "),
        ({"colour": 1}, "record 'a': colour: "),
    ],
)
def test_a_record_that_cannot_be_is_named(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CorruptDataError, match=reason) as caught:
        read_record(**changes)
    assert MANIFEST_NAME in str(caught.value)
    assert "start the run again" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": "other"}, "magic is 'other', and this build reads 'peftds_ext.store'"),
        ({"version": 2, "a_new_key": 1, "records": None}, "version is 2, and this build reads 1;"),
        ({"data_file": "../data.bin"}, "data_file: not a plain file name"),
        ({"data_file": "/etc/passwd"}, "data_file: not a plain file name"),
        ({"data_file": ".."}, "data_file: not a plain file name"),
        ({"data_file": "a\0b"}, "data_file: not a plain file name"),
        ({"data_file": ""}, "data_file: "),
        ({"block_bytes": 0}, "block_bytes: "),
        ({"block_bytes": 2**30 + 1}, "block_bytes: "),
        ({"file_bytes": -1}, "file_bytes: "),
        ({"rank": 2}, "rank 2 of 2"),
        ({"pid": 0}, "pid: "),
        ({"records": [1, 2, 3, 4, 5]}, "record number 2: .*and 2 more"),
        ({"a_new_key": 1}, "a_new_key: "),
    ],
)
def test_a_manifest_that_cannot_be_says_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CorruptDataError, match=reason):
        read_changed(**changes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b'{"magic": "\xff"}', "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b'{"magic": "\\ud800"}', "Invalid JSON"),
        (b"[]", "object"),
        (b"{}", "magic is missing"),
        (json.dumps(VALID).replace("77", "7" * 5000).encode(), "number out of range|valid integer"),
        (json.dumps(VALID).replace("77", "NaN").encode(), "pid: "),
    ],
)
def test_bytes_that_are_no_manifest(content: bytes, reason: str) -> None:
    with pytest.raises(CorruptDataError, match=reason):
        read_bytes(content)


def test_a_missing_manifest_says_that_it_may_come(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match="no manifest; it is still being written") as caught:
        read_manifest(tmp_path)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / MANIFEST_NAME)


def _make_folder(path: Path) -> None:
    path.mkdir()


def _make_link(path: Path) -> None:
    target = path.with_name("elsewhere.json")
    target.write_text(json.dumps(VALID))
    path.symlink_to(target)


@pytest.mark.parametrize("make", [_make_folder, _make_link, os.mkfifo])
def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / MANIFEST_NAME)
    with pytest.raises(CorruptDataError, match=MANIFEST_NAME):
        read_manifest(tmp_path)


def test_a_path_that_no_file_can_have() -> None:
    with pytest.raises(CorruptDataError, match="cannot be a file"):
        read_manifest(Path("a\0b"))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST_NAME
    path.touch()
    os.truncate(path, module.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(CorruptDataError, match="is larger than 268435456 bytes"):
        read_manifest(tmp_path)


def test_a_read_error_of_the_disk_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "open", broken)
    with pytest.raises(CorruptDataError, match="cannot read the manifest: Input/output error") as caught:
        read_manifest(tmp_path)
    assert caught.value.errno == errno.EIO


def assert_holds_together(manifest: Manifest) -> None:
    """Check again, in other words, what a reader of the data file relies on."""
    assert (manifest.magic, manifest.version) == ("peftds_ext.store", 1)
    assert manifest.data_file == Path(manifest.data_file).name != ""
    assert len({record.key for record in manifest.records}) == len(manifest.records)
    for record in manifest.records:
        assert 0 <= record.offset <= record.offset + record.nbytes <= manifest.file_bytes
        assert record.nbytes == math.prod(record.shape) * ITEM_BYTES[record.dtype]
        assert record.crc32c is None or len(record.crc32c) == math.ceil(record.nbytes / manifest.block_bytes)
    for one, other in itertools.combinations(manifest.records, 2):
        shared = min(one.end, other.end) - max(one.offset, other.offset)
        assert shared <= 0 or not one.nbytes or not other.nbytes


def read_or_refuse(content: bytes) -> None:
    with contextlib.suppress(CorruptDataError):
        assert_holds_together(read_bytes(content))


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_raise_nothing_else(content: bytes) -> None:
    read_or_refuse(content)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_changed_bytes_raise_nothing_else(data: st.DataObject) -> None:
    content = bytearray(json.dumps(VALID).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = start + data.draw(st.integers(0, 4))
        content[start:end] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"9", b"-", b"[", b'"', b"0"])
        )
    read_or_refuse(bytes(content))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS | st.integers(-1, 25) | st.sampled_from(["a", "b", "float32", "..", "int8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIRST, *VALID]), inner),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_changed_values_raise_nothing_else(data: st.DataObject) -> None:
    content = copy.deepcopy(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = content
        while True:
            at = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not (isinstance(place[at], dict | list) and place[at] and data.draw(st.booleans())):
                break
            place = place[at]
        if data.draw(st.booleans()):
            place[at] = data.draw(VALUES)
        elif isinstance(place, list):
            place.insert(at, copy.deepcopy(place[at]))
        elif len(place) > 1:
            del place[at]
    read_or_refuse(json.dumps(content).encode())


# how it is written


def name_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


class Calls:
    """Records the calls that make a file durable, in order, and lets them happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        fsync, replace = os.fsync, Path.replace

        def recorded_fsync(descriptor: int) -> None:
            self.made.append(f"fsync {name_of(descriptor).name}")
            fsync(descriptor)

        def recorded_replace(path: Path, target: Path) -> Path:
            self.made.append(f"rename {path.name} {target.name}")
            return replace(path, target)

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(Path, "replace", recorded_replace)


def test_the_file_is_on_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    write_manifest(tmp_path, Manifest.model_validate(VALID))
    temporary = calls.made[0].removeprefix("fsync ")
    assert is_temporary_name(temporary)
    assert calls.made == [
        f"fsync {temporary}",
        f"rename {temporary} {MANIFEST_NAME}",
        f"fsync {tmp_path.name}",
    ]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFullError), (errno.EDQUOT, StorageFullError), (errno.EIO, StorageError)],
)
def test_a_failed_write_keeps_the_old_manifest_and_nothing_else(
    number: int, kind: type[StorageError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Manifest.model_validate(VALID)
    write_manifest(tmp_path, old)

    def full(_: int) -> None:
        raise OSError(number, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"cannot write the manifest of [0-9]+ bytes") as caught:
            write_manifest(tmp_path, old.model_copy(update={"rank": 0}))
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path / MANIFEST_NAME)
    assert read_manifest(tmp_path) == old
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_a_file_system_that_cannot_sync_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuses_folders(descriptor: int) -> None:
        if name_of(descriptor).is_dir():
            raise OSError(errno.EINVAL, "no")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses_folders)
    write_manifest(tmp_path, Manifest.model_validate(VALID))
    assert read_manifest(tmp_path) == Manifest.model_validate(VALID)


def test_a_manifest_that_could_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(StorageError, match="use larger blocks than 8 bytes"):
        write_manifest(tmp_path, Manifest.model_validate(VALID))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file") as caught:
        write_manifest(tmp_path / "gone", Manifest.model_validate(VALID))
    assert caught.value.errno == errno.ENOENT
