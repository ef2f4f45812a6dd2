# SPDX-License-Identifier: Apache-2.0
"""One way to turn what the operating system refused into the package's own errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from peftds_ext.errors import StorageError, StorageFullError


def refused(error: OSError, message: str, path: Path) -> StorageError:
    """Return the error to raise: ``[Errno ..] message: 'path'``; StorageFullError where room is missing."""
    kind = StorageFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
    return kind(error.errno, message, str(path))


def reason_of(error: OSError) -> str:
    """Return the system's words for ``error``, without its number and path."""
    return os.strerror(error.errno) if error.errno is not None else str(error)
