# SPDX-License-Identifier: Apache-2.0
"""Verifying stores: damage is found where it is, and nothing else is reported, changed or waited for."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crc32c_reference import crc32c, crc32c_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from peftds_ext import _native
from peftds_ext.errors import NativeLoadError, StorageError
from peftds_ext.store import verify as module
from peftds_ext.store.folder import DATA_NAME, SWAP_NAME, StoreFolder
from peftds_ext.store.manifest import MANIFEST_NAME, Manifest, Record, read_manifest, write_manifest
from peftds_ext.store.verify import Damage, StoreReport, verify

BLOCK = 16
DATA = bytes((7 * index + 3) % 256 for index in range(120))
# (key, offset, bytes, has checksums): gaps before and after, a last block that is shorter, an empty record.
PARTS = [("a", 4, 40, True), ("v", 44, 20, False), ("empty", 64, 0, True), ("b", 70, 32, True)]
NAME = "rank0-pid1-0000000a"


@pytest.fixture(autouse=True)
def _checksums_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "core", lambda: SimpleNamespace(crc32c_blocks=crc32c_blocks))


def fill(folder: Path, data: bytes = DATA) -> Path:
    """Write a store's data and manifest into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA_NAME).write_bytes(data)
    records = tuple(
        Record(
            key=key,
            dtype="uint8",
            shape=(size,),
            offset=offset,
            nbytes=size,
            crc32c=tuple(crc32c_blocks(DATA[offset : offset + size], BLOCK)) if verified else None,
        )
        for key, offset, size, verified in PARTS
    )
    manifest = Manifest(
        magic="peftds_ext.store",
        version=1,
        data_file=DATA_NAME,
        file_bytes=len(DATA),
        block_bytes=BLOCK,
        rank=0,
        world_size=1,
        pid=1,
        host="node",
        records=records,
    )
    write_manifest(folder, manifest)
    return folder


def only(path: Path) -> StoreReport:
    (report,) = verify(path)
    return report


def places(report: StoreReport) -> list[tuple[str, str | None, int | None, int | None]]:
    return [(damage.kind, damage.key, damage.offset, damage.length) for damage in report.damage]


# checksums


def test_the_reference_gives_the_check_value_of_the_polynomial() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_the_compiled_core_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    core = _native.core()
    if not hasattr(core, "crc32c_blocks"):
        pytest.skip("the compiled core was built without checksums")
    for size in (0, 1, 15, 16, 17, 120):
        for data in (DATA[:size], memoryview(bytearray(DATA))[:size]):
            assert core.crc32c_blocks(data, BLOCK) == crc32c_blocks(data, BLOCK)


# one store


def test_an_intact_store(tmp_path: Path) -> None:
    assert only(fill(tmp_path / NAME)) == StoreReport(
        folder=tmp_path / NAME, records=4, checked_records=3, checked_bytes=72, skipped=("v",), damage=()
    )


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_changed_byte_is_found_in_its_block_and_in_no_other(position: int, change: int) -> None:
    expected = []
    for key, start, size, verified in PARTS:
        if verified and start <= position < start + size:
            block = start + (position - start) // BLOCK * BLOCK
            expected = [("checksum", key, block, min(BLOCK, start + size - block))]
    data = bytearray(DATA)
    data[position] ^= change
    with tempfile.TemporaryDirectory() as folder:
        report = only(fill(Path(folder), bytes(data)))
    assert places(report) == expected
    assert report.intact is not bool(expected)


def test_every_damaged_block_is_named_with_both_checksums(tmp_path: Path) -> None:
    report = only(fill(tmp_path / NAME, bytes(len(DATA))))
    assert places(report) == [
        ("checksum", "a", 4, 16),
        ("checksum", "a", 20, 16),
        ("checksum", "a", 36, 8),
        ("checksum", "b", 70, 16),
        ("checksum", "b", 86, 16),
    ]
    first = report.damage[0]
    assert first.path == tmp_path / NAME / DATA_NAME
    assert first.reason == f"checksum {crc32c(bytes(16)):#010x}, written was {crc32c(DATA[4:20]):#010x}"


def test_a_truncated_file_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    data = bytearray(DATA[:50])
    data[21] ^= 1
    report = only(fill(tmp_path / NAME, bytes(data)))
    assert places(report) == [
        ("truncated", None, None, None),
        ("checksum", "a", 20, 16),
        ("truncated", "v", 50, 14),
        ("truncated", "b", 70, 32),
    ]
    assert report.damage[0].reason == "the file has 50 bytes of 120"
    assert report.checked_bytes == 40


def test_a_file_that_ends_within_a_block(tmp_path: Path) -> None:
    report = only(fill(tmp_path / NAME, DATA[:90]))
    assert places(report) == [("truncated", None, None, None), ("truncated", "b", 90, 12)]
    assert report.checked_bytes == 56


def test_a_file_that_lost_only_what_no_record_uses_is_truncated_all_the_same(tmp_path: Path) -> None:
    assert places(only(fill(tmp_path / NAME, DATA[:110]))) == [("truncated", None, None, None)]


def test_a_file_may_be_longer_than_its_records(tmp_path: Path) -> None:
    assert only(fill(tmp_path / NAME, DATA + bytes(1000))).intact


def _remove(path: Path) -> None:
    path.unlink()


def _into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _into_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _into_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_remove, "No such file"),
        (_into_a_folder, "Is a directory|no regular file"),
        (_into_a_pipe, "no regular file"),
        (_into_a_link, "symbolic links"),
    ],
)
def test_a_data_file_that_cannot_be_read(change: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / NAME)
    change(folder / DATA_NAME)
    report = only(folder)
    assert places(report) == [("unreadable", None, None, None)]
    assert re.search(reason, report.damage[0].reason)
    assert report.skipped == ("v",)


class Watched:
    """A file that notes how much is read at once, and fails or ends where it is told to."""

    def __init__(self, file: Any, fails_at: int = -1, ends_at: int = 10**9) -> None:
        self.file, self.fails_at, self.ends_at = file, fails_at, ends_at
        self.reads: list[tuple[int, int]] = []

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, offset: int) -> int:
        return int(self.file.seek(offset))

    def readinto(self, buffer: memoryview) -> int:
        start = self.file.tell()
        self.reads.append((start, len(buffer)))
        if start <= self.fails_at < start + len(buffer):
            raise OSError(errno.EIO, "broken")
        return min(int(self.file.readinto(buffer)), max(0, self.ends_at - start))

    def read(self, size: int = -1) -> bytes:  # of the manifest
        return bytes(self.file.read(size))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Watched]]:
    fdopen = os.fdopen

    def watch(**how: int) -> list[Watched]:
        files: list[Watched] = []

        def opened(*arguments: Any) -> Watched:
            files.append(Watched(fdopen(*arguments), **how))
            return files[-1]

        monkeypatch.setattr(os, "fdopen", opened)
        return files

    return watch


def test_blocks_are_read_one_by_one(tmp_path: Path, watched: Callable[..., list[Watched]]) -> None:
    folder = fill(tmp_path / NAME)
    files = watched()
    assert only(folder).intact
    assert files[-1].reads == [(4, 16), (20, 16), (36, 8), (70, 16), (86, 16)]


def test_a_block_that_the_disk_does_not_give_stops_no_other(
    tmp_path: Path, watched: Callable[..., list[Watched]]
) -> None:
    data = bytearray(DATA)
    data[90] ^= 1
    folder = fill(tmp_path / NAME, bytes(data))
    watched(fails_at=25)
    report = only(folder)
    assert places(report) == [("unreadable", "a", 20, 16), ("checksum", "b", 86, 16)]
    assert report.damage[0].reason == "cannot read: Input/output error"


def test_a_file_that_is_cut_meanwhile(tmp_path: Path, watched: Callable[..., list[Watched]]) -> None:
    folder = fill(tmp_path / NAME)
    watched(ends_at=80)
    assert places(only(folder)) == [("truncated", "b", 80, 6), ("truncated", "b", 86, 16)]


def test_a_bad_manifest_is_one_finding(tmp_path: Path) -> None:
    folder = fill(tmp_path / NAME)
    (folder / MANIFEST_NAME).write_text("{}")
    report = only(folder)
    assert places(report) == [("manifest", None, None, None)]
    assert report.damage[0].path == folder / MANIFEST_NAME
    assert "magic is missing" in report.damage[0].reason
    (folder / MANIFEST_NAME).unlink()
    report = only(folder)
    assert places(report) == [("manifest", None, None, None)]
    assert "it is still being written" in report.damage[0].reason
    (folder / MANIFEST_NAME).mkdir()
    assert places(only(folder))[0][0] in ("manifest", "unreadable")


def test_nothing_is_changed(tmp_path: Path) -> None:
    folder = fill(tmp_path / NAME)

    def state() -> list[tuple[str, int, int, bytes]]:
        paths = [tmp_path, folder, *sorted(folder.iterdir())]
        stats = [path.stat() for path in paths]
        contents = [path.read_bytes() if path.is_file() else b"" for path in paths]
        return [
            (str(path), status.st_mtime_ns, status.st_ctime_ns, content)
            for path, status, content in zip(paths, stats, contents, strict=True)
        ]

    before = state()
    verify(tmp_path)
    assert state() == before


def test_a_store_is_verified_while_its_owner_holds_it(tmp_path: Path) -> None:
    with StoreFolder.create(tmp_path, rank=0) as store:
        fill(store.path)
        assert only(tmp_path) == only(store.path)
        assert only(store.path).intact


# which stores


def test_stores_are_found_from_the_root_from_the_swap_folder_and_by_their_path(tmp_path: Path) -> None:
    swap = tmp_path / SWAP_NAME
    names = [NAME, "rank1-pid22-0123abcd"]
    for name in names:
        fill(swap / name)
    fill(swap / "other")
    (swap / "rank2-pid1-0000000c").symlink_to(swap / NAME)
    (swap / "rank2-pid1-0000000d").touch()
    for path in (tmp_path, swap):
        assert [report.folder for report in verify(path)] == [swap / name for name in names]
    assert only(swap / NAME).folder == swap / NAME


def test_a_store_that_was_moved_is_known_by_its_manifest(tmp_path: Path) -> None:
    assert only(fill(tmp_path / "copy")).intact


def test_damage_of_one_store_does_not_hide_another(tmp_path: Path) -> None:
    fill(tmp_path / NAME, bytes(len(DATA)))
    fill(tmp_path / "rank1-pid1-0000000a")
    assert [report.intact for report in verify(tmp_path)] == [False, True]


def test_a_folder_without_stores(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").touch()
    with pytest.raises(StorageError, match="holds no store; give a store folder") as caught:
        verify(tmp_path)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / SWAP_NAME).mkdir()
    with pytest.raises(StorageError, match="holds no store"):
        verify(tmp_path)


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / NAME).touch()
    for name, number in (("gone", errno.ENOENT), ("file", errno.ENOTDIR), (NAME, errno.ENOTDIR)):
        with pytest.raises(StorageError, match="cannot read the folder") as caught:
            verify(tmp_path / name)
        assert caught.value.errno == number
        assert caught.value.filename == str(tmp_path / name)


@pytest.mark.parametrize("moment", ["before the manifest", "after the manifest"])
def test_a_store_that_its_owner_removes_meanwhile_is_left_out(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stays = fill(tmp_path / NAME), fill(tmp_path / "rank1-pid1-0000000a")

    def read(folder: Path) -> Manifest:
        if folder == gone and moment == "before the manifest":
            shutil.rmtree(gone)
        manifest = read_manifest(folder)
        if folder == gone:
            shutil.rmtree(gone)
        return manifest

    monkeypatch.setattr(module, "read_manifest", read)
    assert only(tmp_path).folder == stays
    fill(gone)
    with pytest.raises(StorageError, match="holds no store"):
        verify(gone)


def test_without_the_compiled_core_nothing_is_called_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise NativeLoadError("not built")

    monkeypatch.setattr(_native, "core", missing)
    with pytest.raises(NativeLoadError, match="not built"):
        verify(fill(tmp_path / NAME))


def test_findings_are_frozen(tmp_path: Path) -> None:
    report = only(fill(tmp_path / NAME))
    with pytest.raises(AttributeError):
        report.records = 0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Damage("checksum", tmp_path, "").reason = "x"  # type: ignore[misc]
