# SPDX-License-Identifier: Apache-2.0
"""What all subjects of ``bench_io.py`` share: files of one size, their content, and how time is taken."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol

import numpy
import psutil  # type: ignore[import-untyped]
import torch
from interleave import Phases
from torch import Tensor

from peftds_ext import _native

BLOCK: Final = 1 << 20
"""Bytes of one transfer, and of what one checksum covers."""
DEPTH: Final = 8
"""Transfers in flight at once."""
STRIPE: Final = BLOCK * DEPTH
"""What sizes are multiples of, so that they can be shared out among as many threads as the depth."""
DIRECTIONS: Final = ("read", "write")

_IN_MEMORY = ("tmpfs", "ramfs")


class Subject(Protocol):
    """Something that moves the first ``size`` bytes between its file and its memory, in order."""

    notes: list[str]

    def transfer(self, direction: str, size: int) -> Phases:
        """Do it; return the seconds as ``transfer``, and those of all processors as ``cpu``."""

    def system_calls(self, direction: str, size: int) -> int:
        """Return how many system calls :meth:`transfer` makes; raises NotMeasured."""

    def check(self) -> Iterator[str]:
        """Raise ArithmeticError unless the bytes arrive, both ways; yield what was found."""

    def close(self) -> None:
        """Let go of memory, threads and files."""


def file_system(folder: Path) -> str:
    """Return the kind of file system that holds ``folder``, such as ``ext4``; empty if that is not known."""
    resolved = folder.resolve()
    mounts = [
        mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)
    ]
    mounts.sort(key=lambda mount: len(mount.mountpoint))  # of several in one place the last hides the others
    return str(mounts[-1].fstype) if mounts else ""


def complaint(folder: Path, size: int, subjects: int, *, any_folder: bool) -> str | None:
    """Say why ``subjects`` files of ``size`` bytes in ``folder`` would give no result; None if they would."""
    if size < STRIPE or size % STRIPE:
        return f"--io-bytes must be a positive multiple of {STRIPE}, got {size}"
    if not folder.is_dir():
        return f"--io-path must be a folder, which {folder} is not"
    kind = file_system(folder)
    if kind in _IN_MEMORY and not any_folder:
        return (
            f"{folder} is on a {kind}, which is memory and no disk; name a folder on a disk with --io-path, "
            "or measure it nevertheless with --io-any-folder"
        )
    free, needed = shutil.disk_usage(folder).free, subjects * size
    if free < needed:
        return f"{folder} has {free} bytes free and {needed} are needed; see --io-path and --io-bytes"
    return None


@dataclass(frozen=True)
class Storage:
    """Where files are made, and the bytes of each; ``any_folder``: buffered transfers are accepted."""

    folder: Path
    size: int
    any_folder: bool

    @classmethod
    @contextmanager
    def make(cls, folder: Path, size: int, *, any_folder: bool) -> Iterator[Storage]:
        """Make a folder of its own in ``folder``; at the end it and all that is in it are removed."""
        with TemporaryDirectory(prefix="peftds_bench_io_", dir=folder) as made:
            yield cls(Path(made), size, any_folder)

    def make_file(self, name: str) -> Path:
        """Return a new file whose blocks are reserved, written, on the disk, and not in the page cache."""
        path = self.folder / f"{name}.bin"
        piece = torch.empty(min(self.size, 64 * BLOCK), dtype=torch.uint8)
        fill(piece, seed=0)
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, self.size)
            for offset in range(0, self.size, piece.numel()):
                file.write(piece[: self.size - offset].numpy().data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return path


def fill(memory: Tensor, *, seed: int) -> None:
    """Fill whole blocks with bytes that no disk can compress; each block begins with its own number."""
    block = torch.empty(BLOCK, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(seed))
    blocks = memory.view(-1, BLOCK)
    blocks.copy_(block)
    blocks.view(torch.int64)[:, 0] = torch.arange(len(blocks))


def check_round_trip(name: str, path: Path, memory: Tensor, transfer: Callable[[str, int], object]) -> None:
    """Write ``memory`` with new content and read it back.

    Raises:
        ArithmeticError: the file does not hold what was written, or memory not what the file holds.
    """
    core = _native.core()
    size = memory.numel()
    fill(memory, seed=1)
    expected = core.crc32c_blocks(memory.numpy(), BLOCK)
    transfer("write", size)
    in_file = core.crc32c_blocks(numpy.memmap(path, dtype=numpy.uint8, mode="r", shape=(size,)), BLOCK)
    memory.zero_()
    transfer("read", size)
    for direction, found in (("written", in_file), ("read", core.crc32c_blocks(memory.numpy(), BLOCK))):
        wrong = sum(one != other for one, other in zip(found, expected, strict=True))
        if wrong:
            raise ArithmeticError(f"{name}: {wrong} of {len(expected)} blocks were {direction} wrong")


def cpu_seconds(who: int) -> float:
    """Return user and system seconds of ``resource.RUSAGE_SELF`` (all threads) or ``RUSAGE_CHILDREN``."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def accounted(work: Callable[[], object]) -> Phases:
    """Run ``work`` in this process; return its seconds, and those of all threads of this process."""
    cpu, start = cpu_seconds(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return {"transfer": seconds, "cpu": cpu_seconds(resource.RUSAGE_SELF) - cpu}
