# SPDX-License-Identifier: Apache-2.0
"""The storage engine as the rest of the package sees it: tensors in, tensors out, settings chosen."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from peftds_ext import _native, env
from peftds_ext.config import IoConfig
from peftds_ext.errors import ConfigError
from peftds_ext.store.media import locate

if TYPE_CHECKING:
    from peftds_ext._native._core import Arena, Engine, File, Priority, Ticket

logger = logging.getLogger("peftds_ext")

_ALIGNMENT: Final = 4096
_MAX_BLOCK_BYTES: Final = 1 << 30
_MAX_QUEUE_DEPTH: Final = 1024


@dataclass(frozen=True)
class IoSettings:
    """Every setting of the storage engine, none left open but the choice of the engine itself."""

    engine: str | None
    queue_depth: int
    block_bytes: int
    direct: bool
    checksum: Literal["first", "always", "off"]


def choose_settings(config: IoConfig, folder: Path, aio: Mapping[str, Any] | None = None) -> IoSettings:
    """Fill in what the configuration leaves out.

    ``aio`` is DeepSpeed's section of that name as the user wrote it: its ``block_size`` (bytes) and
    ``queue_depth`` hold where ours are left out. What neither says depends on the disk below ``folder``,
    which need not be there yet.

    Raises:
        ConfigError: a number of ``aio`` is not one that the engine takes.
    """
    suited = locate(_nearest_folder(folder)).requests
    aio = aio if isinstance(aio, Mapping) else {}  # DeepSpeed says what is wrong with another kind
    block_bytes = config.block_bytes or _from_aio(aio, "block_size", _MAX_BLOCK_BYTES) or suited.block_bytes
    return IoSettings(
        engine=config.engine,
        queue_depth=config.queue_depth
        or _from_aio(aio, "queue_depth", _MAX_QUEUE_DEPTH)
        or suited.queue_depth,
        block_bytes=-(-block_bytes // _ALIGNMENT) * _ALIGNMENT,
        direct=config.direct,
        checksum=config.checksum,
    )


def _nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def _from_aio(aio: Mapping[str, Any], key: str, largest: int) -> int | None:
    """Return a number of DeepSpeed's section, or None if it is left out or 0."""
    value = aio.get(key)
    if not value:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != int(value)
        or not 0 < value <= largest
    ):
        raise ConfigError(f"aio.{key}: a whole number from 1 to {largest} is needed, got {value!r}")
    return int(value)


class StorageEngine:
    """Moves tensors between memory and files.

    Thread-safe. Tensors must be contiguous and lie in host memory.
    """

    settings: IoSettings

    def __init__(self, settings: IoSettings, page_lock: object | None = None) -> None:
        """Start the engine.

        Given a page lock (:func:`peftds_ext._native.cuda_page_lock`), memory is page-locked as far as the
        system allows it; ``arena.why_not_locked`` tells of memory that is not.

        Raises:
            ConfigError: io_uring is asked for and not to be had, or ``PEFTDS_IO_FAULTS`` is not understood.
        """
        self.settings = settings
        self._core = _native.core()
        self._native: Engine = self._core.Engine(
            method=settings.engine,
            queue_depth=settings.queue_depth,
            block_bytes=settings.block_bytes,
            faults=env.io_faults(),
        )
        self._arena: Arena = self._native.make_arena(page_lock)
        if self._native.why_threads:
            logger.info("storage engine: threads, since %s", self._native.why_threads)

    @property
    def method(self) -> str:
        """``"io_uring"`` or ``"threads"``."""
        return self._native.method

    @property
    def native(self) -> Engine:
        """The compiled engine, for what is compiled as well."""
        return self._native

    @property
    def arena(self) -> Arena:
        """Where :meth:`empty` takes memory from."""
        return self._arena

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a page-aligned tensor of ``numel`` elements (at least one), of exactly the memory it needs.

        The memory goes back when nothing refers to the tensor's storage any more, views that autograd
        has saved included.
        """
        with torch.inference_mode(False):  # what is read in inference may stay for training
            return torch.frombuffer(self._arena.allocate(numel * dtype.itemsize), dtype=dtype)

    def create_file(self, path: Path) -> File:
        """Make a file that must not exist. It is closed when nobody refers to it."""
        file: File = self._core.File(str(path), self._core.Access.CREATE, direct=self.settings.direct)
        self._native.attach(file)
        if self.settings.direct and not file.direct:
            logger.info("%s is read and written through the page cache: %s", path, file.why_buffered)
        return file

    def open_file(self, path: Path) -> File:
        """Open a file that is only read. It is closed when nobody refers to it.

        Raises:
            StorageError: it cannot be opened.
        """
        file: File = self._core.File(str(path), self._core.Access.READ, direct=self.settings.direct)
        self._native.attach(file)
        return file

    def read(self, file: File, pieces: list[tuple[int, Tensor]], *, ahead: bool = False) -> Ticket:
        """Start reading into tensors from their offsets in bytes; with ``ahead`` nobody waits for it yet."""
        priority = self._core.Priority.READ_AHEAD if ahead else self._core.Priority.DEMAND
        return self._submit(self._core.Direction.READ, file, pieces, priority)

    def write(self, file: File, pieces: list[tuple[int, Tensor]]) -> Ticket:
        """Start writing tensors at offsets in bytes."""
        return self._submit(self._core.Direction.WRITE, file, pieces, self._core.Priority.DEMAND)

    def close(self) -> None:
        """Wait for what is under way and end the engine's threads. Idempotent."""
        self._native.close()

    def _submit(
        self, direction: Any, file: File, pieces: list[tuple[int, Tensor]], priority: Priority
    ) -> Ticket:
        extents = []
        for offset, tensor in pieces:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise ValueError("the storage engine moves contiguous tensors in host memory only")
            extents.append((file, offset, tensor.data_ptr(), tensor.nbytes))
        owners = [tensor for _, tensor in pieces]
        return self._native.submit(direction, extents, keep_alive=owners, priority=priority)


def checksums(tensor: Tensor, block_bytes: int) -> list[int]:
    """Return the CRC-32C of each block of a contiguous host tensor's bytes; the last may be shorter."""
    flat = tensor.detach().view(-1).view(torch.uint8).numpy()
    found: list[int] = _native.core().crc32c_blocks(flat, block_bytes, torch.get_num_threads())
    return found
