# SPDX-License-Identifier: Apache-2.0
"""Takes from this process, for good, what a container or an administrator may forbid it."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_IO_URING_SETUP = 425
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_CAPABILITY_VERSION, _IPC_LOCK = 0x20080522, 14
_NEW_MOUNTS = 0x00020000

_libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def forbid_io_uring() -> None:
    """Let io_uring_setup fail with EPERM, as the usual seccomp profiles of containers do."""
    program = (_Instruction * 4)(
        _Instruction(_LOAD, 0, 0, 0),  # the number of the system call
        _Instruction(_EQUAL, 0, 1, _IO_URING_SETUP),
        _Instruction(_RETURN, 0, 0, _ERROR | 1),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    zero = ctypes.c_ulong(0)
    _call("prctl", _NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero)
    _call("prctl", _SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), ctypes.byref(_Program(4, program)), zero, zero)


def limit_locked_memory(size: int) -> None:
    """Allow ``size`` bytes of locked memory, and no capability to lock more."""
    header, sets = _Header(_CAPABILITY_VERSION, 0), (_Sets * 2)()
    _call("capget", ctypes.byref(header), sets)
    sets[0].effective &= ~(1 << _IPC_LOCK)
    sets[0].permitted &= ~(1 << _IPC_LOCK)
    _call("capset", ctypes.byref(header), sets)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (size, size))


def limit_open_files(count: int) -> None:
    """Allow ``count`` open descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def mount_in_memory(path: Path, options: str) -> str:
    """Mount a file system in memory that this process alone sees; return why not, or ""."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        _call("unshare", _NEW_MOUNTS)
    except OSError as error:
        return str(error)
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", options, "none", str(path)]):
        done = subprocess.run(["mount", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return done.stderr.strip()
    return ""
