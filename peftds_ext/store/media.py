# SPDX-License-Identifier: Apache-2.0
"""What kind of disk a folder lies on, and the size and number of requests that suit it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]


class Media(Enum):
    """Kinds of storage that want different requests."""

    FLASH = "flash"
    ROTATIONAL = "rotational"
    NETWORK = "network"
    MEMORY = "memory"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Requests:
    """How storage is asked."""

    block_bytes: int
    """Size of one request, in bytes."""
    queue_depth: int
    """Requests in flight at once."""


_MEMORY: Final = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_NETWORK: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ceph",
        "lustre",
        "gpfs",
        "9p",
        "virtiofs",
        "afs",
        "beegfs",
        "glusterfs",
    }
)
_MIB: Final = 1 << 20

# Flash serves many medium requests at once. A rotating disk loses a seek with each change of place, and a
# network mount a round trip with each request, so both get few and large ones.
_REQUESTS: Final = {
    Media.FLASH: Requests(_MIB, 8),
    Media.UNKNOWN: Requests(_MIB, 8),
    Media.MEMORY: Requests(_MIB, 4),
    Media.NETWORK: Requests(4 * _MIB, 4),
    Media.ROTATIONAL: Requests(8 * _MIB, 2),
}


@dataclass(frozen=True)
class Location:
    """What is known of the storage below a folder."""

    file_system: str
    """Its type as mounted, such as ``ext4``; "" if that cannot be told."""
    media: Media

    @property
    def requests(self) -> Requests:
        """The requests that suit it."""
        return _REQUESTS[self.media]


def locate(folder: Path) -> Location:
    """Find out what a folder lies on. Nothing is raised: what cannot be told is unknown."""
    file_system = _file_system(folder)
    if file_system in _MEMORY:
        return Location(file_system, Media.MEMORY)
    if file_system in _NETWORK or file_system.startswith("fuse"):
        return Location(file_system, Media.NETWORK)
    return Location(file_system, _media_of_device(folder))


def _file_system(folder: Path) -> str:
    """Return the type of the file system with the longest mount point above the folder."""
    path = Path(os.path.realpath(folder))
    try:
        mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    except OSError:
        return ""
    above = next((place for place in (path, *path.parents) if place in mounts), None)
    return "" if above is None else mounts[above]


def _media_of_device(folder: Path) -> Media:
    try:
        device = os.stat(folder).st_dev  # noqa: PTH116 - one call, whatever kind of path this is
        entry = Path(os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
        if "virtio" in str(entry):  # a virtual disk says that it rotates, whatever is behind it
            return Media.UNKNOWN
        queue = next(place / "queue" for place in (entry, entry.parent) if (place / "queue").is_dir())
        rotational = (queue / "rotational").read_text().strip()
    except (OSError, StopIteration):
        return Media.UNKNOWN
    return Media.ROTATIONAL if rotational == "1" else Media.FLASH
