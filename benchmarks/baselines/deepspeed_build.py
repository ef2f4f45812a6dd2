# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's ops need to be loaded or built, and how to say why one was not."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from interleave import NotMeasured


def prepare_environment() -> None:
    """Choose the CPU accelerator, unless one is chosen, and let DeepSpeed find ``ninja``.

    DeepSpeed starts it by name; pip puts it beside the interpreter.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")])


def root_cause(error: BaseException) -> str:
    """Return the first line of the error that ``error`` goes back to."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def async_io_op() -> Any:
    """Return DeepSpeed's op, which it compiles on first use; raises NotMeasured."""
    prepare_environment()
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError as error:
        raise NotMeasured(f"DeepSpeed cannot be imported: {error}") from error
    try:
        return AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError, AttributeError) as error:
        raise NotMeasured(
            f"DeepSpeed's async_io op cannot be loaded or built: {root_cause(error)}"
        ) from error


def require_lockable(size: int) -> None:
    """Raise NotMeasured unless ``size`` bytes can be locked: the op would end the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, size) as memory:
        view = (ctypes.c_char * size).from_buffer(memory)
        failed = libc.mlock(ctypes.byref(view), ctypes.c_size_t(size)) != 0
        reason = os.strerror(ctypes.get_errno())
        del view
    if failed:
        raise NotMeasured(f"aio_handle's memory of {size} bytes cannot be locked ({reason}): see ulimit -l")


def require_direct(path: Path) -> None:
    """Raise NotMeasured unless the file can be opened as the op does it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        raise NotMeasured(f"aio_handle has direct I/O only, and it is refused: {error.strerror}") from error


def require_disk_ops(zero: dict[str, Any], part: int) -> None:
    """Raise NotMeasured unless stock can keep optimizer states where ``zero_optimization`` says.

    ``part``: elements of the largest parameter; a sub-group has whole ones.
    """
    offload = zero["offload_optimizer"]
    if offload["device"] != "nvme":
        return
    async_io_op()
    sub_group = -(-zero["sub_group_size"] // part) * part
    require_lockable(offload["buffer_count"] * sub_group * torch.float32.itemsize)
    with NamedTemporaryFile(dir=offload["nvme_path"]) as file:
        require_direct(Path(file.name))
