# SPDX-License-Identifier: Apache-2.0
"""The folder that holds the swap files of one process and one model, from its creation to its removal.

``<root>/peftds_ext_swap/rank<R>-pid<PID>-<8 hex digits>/`` with ``lock``, ``manifest.json``, ``data.bin``.
The process holds a flock of ``lock`` as long as the folder is in use. The kernel drops it with the process,
however that ends, so that a folder whose lock is free belongs to a dead process; the next one to start
reclaims it. Creation and reclaiming exclude each other by a flock of ``<root>/peftds_ext_swap/.lock``:
nobody meets a folder that is made but not locked yet.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from peftds_ext.errors import StorageError
from peftds_ext.store.manifest import MANIFEST_NAME, is_temporary_name
from peftds_ext.store.media import Media, locate
from peftds_ext.store.refusals import reason_of, refused

SWAP_NAME: Final = "peftds_ext_swap"
DATA_NAME: Final = "data.bin"
LOCK_NAME: Final = "lock"

_MUTEX_NAME: Final = ".lock"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FOLDER: Final = re.compile(r"rank[0-9]+-pid[0-9]+-[0-9a-f]{8}")
_NO_FLOCK: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_OPEN_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPEN_LOCK: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # NFS locks only what is open for writing

_NO_PERMISSION: Final = "no permission to write there; give a folder that you may write to"
_NO_FOLDER: Final = "it is not a folder, or a part of its path is not; give a folder"
_NO_ROOM: Final = "there is no room; free some space, or give a folder on another disk"
_REMEDIES: Final = {
    errno.EROFS: "it is on a read-only file system; give a folder on a writable one",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.EEXIST: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.ELOOP: _NO_FOLDER,
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
}

logger = logging.getLogger("peftds_ext")


class StoreFolder:
    """A swap folder of this process. Made by :meth:`create`; removed at exit, if not before.

    Not removed by a forked child, which shares the object but not the ownership.
    """

    path: Path
    data_path: Path

    def __init__(self, path: Path, folder: int, lock: int | None) -> None:
        """Take over the open descriptors of the folder and of its lock; None: there is no flock here."""
        self.path = path
        self.data_path = path / DATA_NAME
        self._folder = folder
        self._lock = lock
        self._owner = os.getpid()
        _live[path] = self

    @classmethod
    def create(cls, root: Path, *, rank: int, what: str = "the storage folder") -> StoreFolder:
        """Make a folder below ``root``, which is made if it is missing; first remove those of dead processes.

        ``what`` names the root in messages, for example by its key in the configuration.

        Raises:
            StorageError: the root is not a folder, cannot be made or cannot be written to (StorageFullError:
                has no room). No store is left in it then.
        """
        if rank < 0:
            raise ValueError(f"rank is {rank}: give 0 or more")
        with _translated(what, root):
            swap_path = root.absolute() / SWAP_NAME
            root.mkdir(parents=True, exist_ok=True)
        with _translated(what, swap_path):
            swap = _open_swap(swap_path)
        try:
            with _translated(what, swap_path), _exclusive(swap) as has_flock:
                if has_flock:
                    _reclaim_dead(swap, swap_path)
                else:
                    _tell_once(
                        logging.WARNING,
                        swap_path,
                        "this file system has no flock: swap folders of dead processes are not removed",
                    )
                name = f"rank{rank}-pid{os.getpid()}-{secrets.token_hex(4)}"
                folder, lock = _make_folder(swap, name, locked=has_flock)
        finally:
            os.close(swap)
        return cls(swap_path / name, folder, lock)

    def remove(self) -> None:
        """Delete the folder and the files that this package makes in it. Idempotent; not in a forked child.

        Files are to be closed before: a network file system keeps open ones. What cannot be removed is told
        in the log and not raised, since it does no harm to what was computed.
        """
        if os.getpid() != self._owner or _live.pop(self.path, None) is None:
            return
        try:
            own, _ = _content(self._folder)
            _unlink(self._folder, own)
            self._close()
            self.path.rmdir()
        except FileNotFoundError:
            pass  # somebody else removed it
        except OSError as error:
            logger.warning("%s is not removed: %s; remove it by hand", self.path, reason_of(error))
        finally:
            self._close()

    def __enter__(self) -> StoreFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _close(self) -> None:
        for descriptor in (self._lock, self._folder):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._lock, self._folder = None, -1


_live: dict[Path, StoreFolder] = {}
_told: set[Path] = set()


@atexit.register
def _remove_all() -> None:
    for folder in list(_live.values()):
        folder.remove()


def is_store_name(name: str) -> bool:
    """Tell whether a folder of this name is one that :class:`StoreFolder` makes."""
    return _FOLDER.fullmatch(name) is not None


@contextlib.contextmanager
def _translated(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        default = f"the system refused ({reason_of(error)}); give another folder"
        reason = _REMEDIES.get(error.errno or 0, default)
        raise refused(error, f"{what} cannot be used: {reason}", path) from error
    except ValueError as error:
        raise StorageError(f"{what} cannot be used: {str(path)!r}: {error}; give another folder") from error


def _open_swap(path: Path) -> int:
    """Open the folder of all stores. It is made as accessible as the root: several users may share one."""
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        mode = stat.S_IMODE(path.parent.stat().st_mode)
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
    return os.open(path, _OPEN_FOLDER)


@contextlib.contextmanager
def _exclusive(swap: int) -> Iterator[bool]:
    """Exclude all others that create or reclaim folders; yields False if the file system has no flock."""
    descriptor = _open_mutex(swap)
    try:
        has_flock = _flock(descriptor, fcntl.LOCK_EX)
        try:
            yield has_flock
        finally:
            # Closing would not do where another thread has forked meanwhile: the child shares the lock.
            if has_flock:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open_mutex(swap: int) -> int:
    """Open ``.lock``; made if missing, for all who may write to the folder."""
    while True:
        # O_CREAT is not for a file that exists: sticky folders refuse it for the file of another user.
        with contextlib.suppress(FileNotFoundError):
            return os.open(_MUTEX_NAME, _OPEN_LOCK, dir_fd=swap)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(_MUTEX_NAME, _OPEN_LOCK | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=swap)
            os.fchmod(descriptor, os.fstat(swap).st_mode & 0o666)
            return descriptor


def _flock(descriptor: int, operation: int) -> bool:
    """Take a lock; returns False if the file system has none."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return False
        raise
    return True


def _make_folder(swap: int, name: str, *, locked: bool) -> tuple[int, int | None]:
    """Make a folder and take its lock; returns both descriptors.

    Without flock there is no lock file either: a process that could lock it would take the folder for dead.
    """
    os.mkdir(name, 0o700, dir_fd=swap)
    folder = -1
    try:
        folder = os.open(name, _OPEN_FOLDER, dir_fd=swap)
        return folder, _make_lock(folder) if locked else None
    except BaseException:
        if folder >= 0:
            with contextlib.suppress(OSError):
                os.unlink(LOCK_NAME, dir_fd=folder)
            os.close(folder)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=swap)
        raise


def _make_lock(folder: int) -> int:
    lock = os.open(LOCK_NAME, _OPEN_LOCK | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, _boot_id())
    except BaseException:
        os.close(lock)
        raise
    return lock


def _boot_id() -> bytes:
    """Return what names this machine since it was started; the same for all its containers."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


class _LeftAlone(Exception):
    """Why a folder with a name like ours is not reclaimed, and how much that is worth telling."""

    def __init__(self, reason: str, level: int = logging.WARNING) -> None:
        super().__init__(reason)
        self.level = level


def _reclaim_dead(swap: int, swap_path: Path) -> None:
    locks_reach_others = locate(swap_path).media is not Media.NETWORK
    folders = freed = 0
    for name in sorted(filter(is_store_name, os.listdir(swap))):
        try:
            size = _reclaim(swap, name, locks_reach_others=locks_reach_others)
        except FileNotFoundError:
            continue  # it vanished meanwhile: its owner has removed it
        except _LeftAlone as error:
            _tell_once(error.level, swap_path / name, f"is left alone: {error}")
            continue
        except OSError as error:
            _tell_once(logging.WARNING, swap_path / name, f"is left alone: {reason_of(error)}")
            continue
        if size is not None:
            folders += 1
            freed += size
    if folders:
        logger.info(
            "removed %d swap folder(s) of dead processes, %d bytes, from %s", folders, freed, swap_path
        )


def _reclaim(swap: int, name: str, *, locks_reach_others: bool) -> int | None:
    """Remove a folder if its process is dead; returns the bytes of its files, None if the process lives.

    Where locks may be known to one machine alone, as on some network mounts, only folders that this one has
    made since it was started can be told to be dead.
    """
    folder = _open_own_folder(swap, name)
    try:
        lock = _open_lock_of(folder)
        if lock is None:
            return None
        try:
            if not _is_free(lock):
                return None
            made_by = os.read(lock, 64)
            if not locks_reach_others and made_by != _boot_id():
                raise _LeftAlone(
                    "it was made by another machine, or before this one was started; remove it by hand if no "
                    "process uses it"
                )
            own, foreign = _content(folder)
            if foreign:
                raise _LeftAlone(
                    f"it holds {foreign[0]!r}, which is not from this package; remove it by hand"
                )
            _unlink(folder, own)
        finally:
            os.close(lock)
    finally:
        os.close(folder)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=swap)
    return sum(own.values())


def _open_own_folder(swap: int, name: str) -> int:
    _check_owner(os.stat(name, dir_fd=swap, follow_symlinks=False))
    folder = os.open(name, _OPEN_FOLDER, dir_fd=swap)
    try:
        _check_owner(os.fstat(folder))  # of what was opened, in case the name was given to another one
    except BaseException:
        os.close(folder)
        raise
    return folder


def _check_owner(status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise _LeftAlone("it is not a folder")
    if status.st_uid != os.geteuid():
        raise _LeftAlone(f"it belongs to the user {status.st_uid}", logging.INFO)


def _open_lock_of(folder: int) -> int | None:
    """Open a folder's lock file; None where there is neither a lock nor anything else.

    That is a folder that its owner is about to remove.
    """
    try:
        lock = os.open(LOCK_NAME, _OPEN_LOCK, dir_fd=folder)
    except FileNotFoundError:
        if os.listdir(folder):
            raise _LeftAlone("it has no lock; remove it by hand if no process uses it") from None
        return None
    return lock


def _is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _content(folder: int) -> tuple[dict[str, int], list[str]]:
    """Return size by name of the files that this package makes, the lock last, and names of all else."""
    own: dict[str, int] = {}
    foreign: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            known = entry.name in (LOCK_NAME, MANIFEST_NAME, DATA_NAME) or is_temporary_name(entry.name)
            if known and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    own[entry.name] = entry.stat(follow_symlinks=False).st_size
            else:
                foreign.append(entry.name)
    # Whoever is killed on the way leaves a folder that the next process can still lock and reclaim.
    return {name: own[name] for name in sorted(own, key=lambda name: name == LOCK_NAME)}, sorted(foreign)


def _unlink(folder: int, names: dict[str, int]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _tell_once(level: int, path: Path, message: str) -> None:
    if path not in _told:
        _told.add(path)
        logger.log(level, "%s: %s", path, message)
