# SPDX-License-Identifier: Apache-2.0
"""What a folder lies on, told from mounts and a /sys of the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from peftds_ext.store.media import Location, Media, Requests, locate

Mount = Callable[..., None]
MIB = 1 << 20


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Return a function that says what is mounted where, in the order of mounting."""

    def mount(*mounts: tuple[str | Path, str]) -> None:
        found = [SimpleNamespace(mountpoint=str(point), fstype=kind) for point, kind in mounts]
        monkeypatch.setattr(psutil, "disk_partitions", lambda all=False: found if all else [])

    return mount


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the folder's block device, a partition if asked for, rotate or not."""
    number = tmp_path.stat().st_dev
    entry = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
    original = os.path.realpath

    def device(rotational: str | None, *, partition: bool = False) -> None:
        disk = tmp_path / "sys" / "devices" / "disk0"
        place = disk / "disk0p1" if partition else disk
        place.mkdir(parents=True)
        if rotational is not None:
            (disk / "queue").mkdir()
            (disk / "queue" / "rotational").write_text(rotational)
        monkeypatch.setattr(
            os.path,
            "realpath",
            lambda path, **kwargs: str(place) if str(path) == entry else original(path, **kwargs),
        )

    return device


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize(("rotational", "media"), [("0\n", Media.FLASH), ("1\n", Media.ROTATIONAL)])
def test_a_disk(
    tmp_path: Path,
    mount: Mount,
    device: Callable[..., None],
    rotational: str,
    media: Media,
    partition: bool,
) -> None:
    mount(("/", "ext4"))
    device(rotational, partition=partition)
    assert locate(tmp_path) == Location("ext4", media)


def test_a_disk_that_tells_nothing(tmp_path: Path, mount: Mount, device: Callable[..., None]) -> None:
    mount(("/", "overlay"))
    device(None)
    assert locate(tmp_path) == Location("overlay", Media.UNKNOWN)


@pytest.mark.parametrize(
    ("kind", "media"),
    [
        ("tmpfs", Media.MEMORY),
        ("ramfs", Media.MEMORY),
        ("nfs4", Media.NETWORK),
        ("lustre", Media.NETWORK),
        ("9p", Media.NETWORK),
        ("fuse.sshfs", Media.NETWORK),
    ],
)
def test_file_systems_without_a_disk_of_their_own(
    tmp_path: Path, mount: Mount, device: Callable[..., None], kind: str, media: Media
) -> None:
    mount(("/", "ext4"), (tmp_path, kind))
    device("1\n")
    assert locate(tmp_path / "not" / "there" / "yet") == Location(kind, media)


def test_the_longest_mount_point_counts_and_of_one_place_the_last_mount(
    tmp_path: Path, mount: Mount, device: Callable[..., None]
) -> None:
    device("0\n")
    inner = tmp_path / "a" / "inner"
    inner.mkdir(parents=True)
    mount((inner, "tmpfs"), ("/", "ext4"), (tmp_path / "a", "nfs"), (f"{tmp_path}/a/in", "cifs"))
    assert locate(inner).media is Media.MEMORY
    assert locate(tmp_path / "a").media is Media.NETWORK
    assert locate(tmp_path / "a" / "inn").media is Media.NETWORK
    assert locate(tmp_path).media is Media.FLASH
    mount(("/", "ext4"), (tmp_path, "tmpfs"), (tmp_path, "xfs"))
    assert locate(tmp_path) == Location("xfs", Media.FLASH)


def test_a_link_is_followed(tmp_path: Path, mount: Mount) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    mount(("/", "ext4"), (tmp_path / "real", "tmpfs"))
    assert locate(tmp_path / "link").media is Media.MEMORY


def test_nothing_is_raised_where_nothing_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(all: bool = False) -> list[object]:
        raise PermissionError(13, "Permission denied", "/proc/self/mounts")

    monkeypatch.setattr(psutil, "disk_partitions", refuse)
    assert locate(tmp_path / "missing") == Location("", Media.UNKNOWN)
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    assert locate(tmp_path / "missing") == Location("", Media.UNKNOWN)


def test_the_real_machine(tmp_path: Path) -> None:
    assert locate(tmp_path).file_system
    if Path("/dev/shm").is_mount():
        assert locate(Path("/dev/shm")) == Location("tmpfs", Media.MEMORY)


@pytest.mark.parametrize("media", Media)
def test_every_kind_has_requests_that_the_engine_takes(media: Media) -> None:
    requests = Location("any", media).requests
    assert 1 <= requests.queue_depth <= 1024
    assert requests.block_bytes % 4096 == 0
    assert MIB <= requests.block_bytes <= 1 << 30


def test_a_rotating_disk_and_a_network_get_few_and_large_requests() -> None:
    assert Location("ext4", Media.ROTATIONAL).requests == Requests(8 * MIB, 2)
    assert Location("nfs", Media.NETWORK).requests == Requests(4 * MIB, 4)
    assert Location("ext4", Media.FLASH).requests == Requests(MIB, 8)
