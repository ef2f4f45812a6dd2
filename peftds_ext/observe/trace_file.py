# SPDX-License-Identifier: Apache-2.0
"""A file that grows by whole pieces of text, and whose failure after its first piece is told, not raised."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Final

from peftds_ext.errors import ConfigError, StorageError, StorageFullError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_ROOM: Final = "there is no room; free some space, or give a path on another disk"
_NO_PERMISSION: Final = "no permission to write there; give a path that you may write to"
_REMEDIES: Final = {
    errno.ENOENT: "its folder does not exist; make it, or give another path",
    errno.ENOTDIR: "a part of its path is not a folder; give another path",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EROFS: "it is on a read-only file system; give a path on a writable one",
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "it is as large as a file may be here; raise the limit (ulimit -f)",
}

logger = logging.getLogger("peftds_ext")


class TraceFile:
    """A file of ASCII text. What :meth:`append` has written is not lost with the process.

    For one thread at a time.
    """

    def __init__(self, path: Path, header: str, ending: str) -> None:
        """Make the file, in place of one that is there; ``header`` begins it and ``ending`` will end it.

        Raises:
            ConfigError: ``path`` is a folder, or not a path at all.
            StorageError: the file cannot be made or written to (StorageFullError: there is no room).
        """
        self._path, self._ending, self._size = path, ending, 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)  # not emptied yet
            self._file = os.fdopen(descriptor, "wb", buffering=0)
        except (IsADirectoryError, ValueError) as error:
            reason = "it is a folder" if isinstance(error, OSError) else str(error)
            raise ConfigError(f"trace: {str(path)!r}: {reason}; give the path of a file to write") from error
        except OSError as error:
            raise _refused(error, path) from error
        try:
            self._take(path)
            self._write(header)
        except OSError as error:
            self._file.close()
            raise _refused(error, path) from error

    def _take(self, path: Path) -> None:
        """Empty the file, unless somebody else writes to it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"trace: {str(path)!r} is being written by another engine or run; give each a file of its own"
            ) from error
        except OSError:  # a file system without locks
            logger.info("the trace %s cannot be locked: let nobody else write to it", path)
        if os.fstat(self._file.fileno()).st_size:
            self._file.truncate(0)

    def append(self, text: str) -> None:
        """Write ``text`` as a whole; if that fails, end the file before it, and say so once in the log.

        Does nothing after that, nor after :meth:`close`.
        """
        if self._file.closed:
            return
        try:
            self._write(text)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # also makes room for the ending
                self._write(self._ending)
            self._file.close()
            logger.warning("the trace %s is not written any further: %s", self._path, _reason(error))

    def close(self) -> None:
        """Write the ending. Idempotent."""
        self.append(self._ending)
        self._file.close()

    def _write(self, text: str) -> None:
        """Write at the end of the last whole piece, wherever an earlier call was interrupted."""
        rest = memoryview(text.encode("ascii"))
        end = self._size + len(rest)
        while rest:
            rest = rest[os.pwrite(self._file.fileno(), rest, end - len(rest)) :]
        self._size = end


def _reason(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, f"the system refused ({error.strerror}); give another path")


def _refused(error: OSError, path: Path) -> StorageError:
    kind = StorageFullError if error.errno in _FULL else StorageError
    return kind(error.errno, f"the trace cannot be written: {_reason(error)}", str(path))
