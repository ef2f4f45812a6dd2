# SPDX-License-Identifier: Apache-2.0
"""Swap folders: whose are removed and whose not, at every way to end a process, and what a root may be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import peftds_ext
from peftds_ext.errors import StorageError, StorageFullError
from peftds_ext.store.folder import DATA_NAME, LOCK_NAME, SWAP_NAME, StoreFolder, is_store_name
from peftds_ext.store.manifest import MANIFEST_NAME
from peftds_ext.store.media import Location, Media

NOBODY = 65534
KEY = "zero_optimization.offload_param.nvme_path"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user: needs root")


def environment(**more: str) -> dict[str, str]:
    paths = [str(Path(peftds_ext.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def stores(root: Path) -> set[str]:
    swap = root / SWAP_NAME
    return {path.name for path in swap.iterdir() if is_store_name(path.name)} if swap.exists() else set()


def dead_store(root: Path, name: str = "rank0-pid1-0000000a", data: bytes = b"12345678") -> Path:
    """Make the folder that a killed process leaves: complete, and nobody holds its lock."""
    folder = root / SWAP_NAME / name
    folder.mkdir(parents=True)
    (folder / LOCK_NAME).touch()
    (folder / MANIFEST_NAME).write_bytes(b"{}")
    (folder / DATA_NAME).write_bytes(data)
    return folder


def is_locked(folder: Path) -> bool:
    with (folder / LOCK_NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "peftds_ext" and r.levelno == level]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="peftds_ext")


# one store


def test_a_store_is_a_locked_folder_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with StoreFolder.create(root, rank=3) as store:
        assert store.path.parent == root / SWAP_NAME
        assert store.path.name.startswith(f"rank3-pid{os.getpid()}-")
        assert is_store_name(store.path.name)
        assert store.data_path == store.path / "data.bin"
        assert [path.name for path in store.path.iterdir()] == ["lock"]
        assert store.path.stat().st_mode & 0o777 == 0o700
        assert is_locked(store.path)
    assert stores(root) == set()


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = StoreFolder.create(Path("nvme"), rank=0)
    monkeypatch.chdir("/")
    assert store.path.is_absolute()
    assert store.path.is_dir()
    store.remove()
    assert stores(tmp_path / "nvme") == set()


def test_descriptors_are_closed_on_exec_and_after_removal(tmp_path: Path) -> None:
    def held(below: Path) -> list[int]:
        found = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(link.readlink()).startswith(str(below)):
                    found.append(int(link.name))
        return found

    store = StoreFolder.create(tmp_path, rank=0)
    assert held(store.path / LOCK_NAME)
    assert not any(os.get_inheritable(descriptor) for descriptor in held(tmp_path))
    store.remove()
    assert held(tmp_path) == []


def test_removal_takes_all_that_a_store_holds_and_may_be_repeated(tmp_path: Path) -> None:
    store = StoreFolder.create(tmp_path, rank=0)
    store.data_path.write_bytes(b"x")
    (store.path / MANIFEST_NAME).touch()
    (store.path / f"{MANIFEST_NAME}.0123abcd.tmp").touch()
    store.remove()
    assert not store.path.exists()
    store.remove()
    assert (tmp_path / SWAP_NAME).is_dir()


def test_a_second_removal_spares_a_folder_that_took_the_place(tmp_path: Path) -> None:
    store = StoreFolder.create(tmp_path, rank=0)
    store.remove()
    successor = dead_store(tmp_path, store.path.name)
    store.remove()
    assert (successor / DATA_NAME).exists()


def test_removal_of_what_somebody_else_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = StoreFolder.create(tmp_path, rank=0)
    shutil.rmtree(store.path)
    store.remove()
    assert messages(caplog, logging.WARNING) == []


def test_removal_spares_what_the_package_did_not_make(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = StoreFolder.create(tmp_path, rank=0)
    store.data_path.write_bytes(b"x")
    (store.path / "notes.txt").write_text("mine")
    store.remove()
    assert [path.name for path in store.path.iterdir()] == ["notes.txt"]
    (message,) = messages(caplog, logging.WARNING)
    assert str(store.path) in message
    assert "remove it by hand" in message


def test_removal_stays_in_the_folder_that_was_made(tmp_path: Path) -> None:
    store = StoreFolder.create(tmp_path, rank=0)
    moved, other = tmp_path / "moved", tmp_path / "other"
    store.path.rename(moved)
    other.mkdir()
    (other / DATA_NAME).write_text("precious")
    store.path.symlink_to(other)
    store.remove()
    assert (other / DATA_NAME).read_text() == "precious"
    assert list(moved.iterdir()) == []


def test_an_exception_in_the_block_removes_the_store(tmp_path: Path) -> None:
    with pytest.raises(KeyError), StoreFolder.create(tmp_path, rank=0):
        raise KeyError
    assert stores(tmp_path) == set()


def test_two_stores_of_one_process_are_strangers(tmp_path: Path) -> None:
    with StoreFolder.create(tmp_path, rank=0) as one:
        one.data_path.write_bytes(b"one")
        with StoreFolder.create(tmp_path, rank=0) as two:
            assert two.path != one.path
            assert not two.data_path.exists()
        assert one.data_path.read_bytes() == b"one"
        assert is_locked(one.path)


def test_a_negative_rank_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank is -1"):
        StoreFolder.create(tmp_path, rank=-1)
    assert list(tmp_path.iterdir()) == []


# many at once


def test_forty_threads_get_forty_stores(tmp_path: Path) -> None:
    dead = dead_store(tmp_path)
    with ThreadPoolExecutor(40) as pool:
        made = list(pool.map(lambda rank: StoreFolder.create(tmp_path, rank=rank), range(40)))
    try:
        assert len({store.path for store in made}) == 40
        assert all(is_locked(store.path) for store in made)
        assert not dead.exists()
    finally:
        for store in made:
            store.remove()
    assert stores(tmp_path) == set()


def test_processes_that_start_at_once_spare_each_other(tmp_path: Path) -> None:
    dead_store(tmp_path)
    ready, told = os.pipe()
    hold, release = os.pipe()
    children = []
    for rank in range(12):
        pid = os.fork()
        if pid == 0:
            status = 3
            with contextlib.suppress(BaseException):
                os.close(release)
                try:
                    store = StoreFolder.create(tmp_path, rank=rank)
                    store.data_path.write_text(str(rank))
                finally:
                    os.write(told, b".")
                os.read(hold, 1)  # until the parent has closed its end
                status = 0 if store.data_path.read_text() == str(rank) else 1
            os._exit(status)
        children.append(pid)
    count = 0
    while count < len(children):
        count += len(os.read(ready, 100))
    alive = stores(tmp_path)
    os.close(release)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    for descriptor in (ready, told, hold):
        os.close(descriptor)
    assert statuses == [0] * len(children)
    assert len(alive) == len(children)
    assert stores(tmp_path) == alive  # they ended without clean-up
    with StoreFolder.create(tmp_path, rank=0) as store:
        assert stores(tmp_path) == {store.path.name}


@pytest.mark.timeout(60)
def test_a_fork_during_creation_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, release = os.pipe()
    children = []

    def forks(count: int) -> str:
        pid = os.fork()
        if pid == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        children.append(pid)
        return "0" * 2 * count

    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", forks)
        first = StoreFolder.create(tmp_path, rank=0)
    try:
        with StoreFolder.create(tmp_path, rank=1):
            assert first.path.is_dir()
    finally:
        os.close(release)
        os.waitpid(children[0], 0)
        os.close(hold)
        first.remove()


# dead processes


HOLDER = """
import sys
from pathlib import Path
from peftds_ext.store.folder import StoreFolder
store = StoreFolder.create(Path(sys.argv[1]), rank=0)
store.data_path.write_bytes(b"x" * 1000)
print(store.path, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holder(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that has a store below ``root`` until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.communicate(timeout=60)


def test_the_folder_of_a_killed_process_is_reclaimed_and_that_of_a_living_one_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path) as (_, kept):
        with holder(tmp_path) as (process, lost):
            process.send_signal(signal.SIGKILL)
        assert lost.is_dir()
        with StoreFolder.create(tmp_path, rank=0) as store:
            assert stores(tmp_path) == {kept.name, store.path.name}
        assert (kept / DATA_NAME).stat().st_size == 1000
        (message,) = messages(caplog, logging.INFO)
        assert "1 swap folder(s) of dead processes, 1036 bytes" in message  # with the boot id in the lock
    assert stores(tmp_path) == set()  # the other one ended as it should


def test_the_log_sums_up_what_was_reclaimed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = dead_store(tmp_path, "rank0-pid1-0000000a", b"x" * 100)
    second = dead_store(tmp_path, "rank17-pid4000000-ffffffff", b"x" * 30)
    (second / f"{MANIFEST_NAME}.0123abcd.tmp").write_bytes(b"xyz")
    StoreFolder.create(tmp_path, rank=0).remove()
    assert not first.exists()
    assert not second.exists()
    (message,) = messages(caplog, logging.INFO)
    assert message.startswith(
        "removed 2 swap folder(s) of dead processes, 137 bytes"
    )  # manifests have 2 each
    assert messages(caplog, logging.WARNING) == []


def test_names_that_are_not_ours_are_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [
        "rank0-pid1-0000000",
        "rank0-pid1-0000000A",
        "rank-pid1-0000000a",
        "xrank0-pid1-0000000a",
        "zero",
    ]
    folders = [dead_store(tmp_path, name) for name in names]
    outside = dead_store(tmp_path / "rank0-pid1-0000000a")
    StoreFolder.create(tmp_path, rank=0).remove()
    assert all(len(list(folder.iterdir())) == 3 for folder in [*folders, outside])
    assert caplog.records == []


def _with_a_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def _with_a_folder(folder: Path) -> None:
    (folder / "sub").mkdir()


def _with_a_link_for_data(folder: Path) -> None:
    (folder / DATA_NAME).unlink()
    (folder / DATA_NAME).symlink_to("/dev/null")


def _with_a_link_for_a_lock(folder: Path) -> None:
    target = folder.parent.parent / "target"
    target.touch()
    (folder / LOCK_NAME).unlink()
    (folder / LOCK_NAME).symlink_to(target)


def _with_a_pipe_for_a_lock(folder: Path) -> None:
    (folder / LOCK_NAME).unlink()
    os.mkfifo(folder / LOCK_NAME)


def _with_a_folder_for_a_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()
    (folder / MANIFEST_NAME).mkdir()


def _without_a_lock(folder: Path) -> None:
    (folder / LOCK_NAME).unlink()


@pytest.mark.parametrize(
    "change",
    [
        _with_a_file,
        _with_a_folder,
        _with_a_link_for_data,
        _with_a_link_for_a_lock,
        _with_a_pipe_for_a_lock,
        _with_a_folder_for_a_manifest,
        _without_a_lock,
    ],
)
def test_a_folder_that_holds_anything_else_is_left_and_told_once(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = dead_store(tmp_path)
    change(folder)
    before = sorted(folder.iterdir())
    for _ in range(2):
        StoreFolder.create(tmp_path, rank=0).remove()
    assert sorted(folder.iterdir()) == before
    (message,) = messages(caplog, logging.WARNING)
    assert str(folder) in message
    assert "left alone" in message


def test_a_link_to_a_folder_is_left_and_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = dead_store(tmp_path / "elsewhere")
    link = tmp_path / SWAP_NAME / target.name
    link.parent.mkdir()
    link.symlink_to(target)
    StoreFolder.create(tmp_path, rank=0).remove()
    assert link.is_symlink()
    assert len(list(target.iterdir())) == 3
    (message,) = messages(caplog, logging.WARNING)
    assert "it is not a folder" in message


@AS_ROOT
def test_the_folder_of_another_user_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = dead_store(tmp_path)
    os.chown(folder, NOBODY, -1)
    StoreFolder.create(tmp_path, rank=0).remove()
    assert len(list(folder.iterdir())) == 3
    (message,) = messages(caplog, logging.INFO)  # it may well be in use: no reason to warn
    assert f"belongs to the user {NOBODY}" in message
    assert messages(caplog, logging.WARNING) == []


def test_a_folder_that_its_owner_is_removing_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = tmp_path / SWAP_NAME / "rank0-pid1-0000000a"
    empty.mkdir(parents=True)
    StoreFolder.create(tmp_path, rank=0).remove()
    assert empty.is_dir()
    assert caplog.records == []


@pytest.mark.parametrize("call", ["listdir", "scandir", "rmdir"])
def test_a_folder_that_vanishes_meanwhile_is_no_news(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = dead_store(tmp_path, "rank0-pid1-0000000a")
    other = dead_store(tmp_path, "rank0-pid1-0000000b")
    original = getattr(os, call)

    def vanishes(*arguments: object, **keywords: object) -> object:
        monkeypatch.undo()
        if call != "listdir":
            shutil.rmtree(gone)
        result = original(*arguments, **keywords)
        shutil.rmtree(gone, ignore_errors=True)
        return result

    monkeypatch.setattr(os, call, vanishes)
    StoreFolder.create(tmp_path, rank=0).remove()
    assert not gone.exists()
    assert not other.exists()
    assert messages(caplog, logging.WARNING) == []


# forks and the end of the process


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    with StoreFolder.create(tmp_path, rank=0) as store:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                store.remove()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert is_locked(store.path)
    assert stores(tmp_path) == set()


def test_a_child_that_ends_like_any_interpreter_spares_its_parents_store(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    code = """
import os, sys
from pathlib import Path
from peftds_ext.store.folder import StoreFolder
store = StoreFolder.create(Path(os.environ["ROOT"]), rank=0)
pid = os.fork()
if pid == 0:
    own = StoreFolder.create(Path(os.environ["ROOT"]), rank=1)
    sys.exit(0 if store.path.is_dir() else 1)  # runs the exit handlers, unlike os._exit
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert [path.name for path in store.path.parent.glob("rank*")] == [store.path.name]
"""
    run_python(code, ROOT=str(tmp_path))
    assert stores(tmp_path) == set()


@pytest.mark.parametrize(
    ("end", "status"), [("raise RuntimeError('unhandled')", 1), ("sys.exit(3)", 3), ("", 0)]
)
def test_every_orderly_end_of_a_process_removes_its_stores(end: str, status: int, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from peftds_ext.store.folder import StoreFolder
made = [StoreFolder.create(Path(sys.argv[1]), rank=rank) for rank in range(2)]
for store in made:
    store.data_path.write_bytes(b"x")
assert len(list(made[0].path.parent.glob("rank*"))) == 2
{end}
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), capture_output=True, timeout=240
    )
    assert run.returncode == status, run.stderr
    assert (tmp_path / SWAP_NAME).is_dir()
    assert stores(tmp_path) == set()


# file systems without flock


@pytest.mark.parametrize(
    "number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS]
)
def test_without_flock_there_is_a_store_but_no_clean_up(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_flock(*_: object) -> None:
        raise OSError(number, "no flock")

    dead = dead_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_flock)
        with StoreFolder.create(tmp_path, rank=0) as one, StoreFolder.create(tmp_path, rank=0) as two:
            for store in (one, two):
                store.data_path.write_bytes(b"x")
            assert stores(tmp_path) == {dead.name, one.path.name, two.path.name}
            (message,) = messages(caplog, logging.WARNING)
            assert "no flock" in message
            patch.undo()
            # A process that can lock, on another node, must not take these for dead.
            StoreFolder.create(tmp_path, rank=0).remove()
            assert stores(tmp_path) == {one.path.name, two.path.name}
    assert stores(tmp_path) == set()


def test_other_failures_to_lock_are_errors_and_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def second_fails(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB:
            raise OSError(errno.EIO, "broken")
        flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", second_fails)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            StoreFolder.create(tmp_path, rank=0)
    assert caught.value.errno == errno.EIO
    assert stores(tmp_path) == set()
    with StoreFolder.create(tmp_path, rank=0) as store:  # the other lock was given back
        assert is_locked(store.path)


# roots that will not do


def tree(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refusal(root: Path, above: Path) -> StorageError:
    """Return the error of a root; nothing may have been made below ``above``."""
    before = tree(above)
    with pytest.raises(StorageError) as caught:
        StoreFolder.create(root, rank=0, what=KEY)
    assert tree(above) == before
    assert KEY in str(caught.value)
    return caught.value


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.touch()
    for path in (root, root / "below"):
        error = refusal(path, tmp_path)
        assert error.errno in (errno.EEXIST, errno.ENOTDIR)
        assert error.filename == str(path)
        assert "it is not a folder, or a part of its path is not; give a folder" in str(error)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_swap_folder_that_is_none(kind: str, tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    swap = root / SWAP_NAME
    if kind == "file":
        swap.touch()
    else:
        swap.symlink_to(other)
    error = refusal(root, tmp_path)
    assert error.filename == str(swap)
    assert "not a folder" in str(error)


def test_a_root_whose_name_cannot_be(tmp_path: Path) -> None:
    error = refusal(tmp_path / ("x" * 300), tmp_path)
    assert error.errno == errno.ENAMETOOLONG
    assert "File name too long" in str(error)
    assert "embedded null" in str(refusal(tmp_path / "a\0b", tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, "full")

    monkeypatch.setattr(os, "mkdir", full)
    error = refusal(tmp_path / "root", tmp_path)
    assert isinstance(error, StorageFullError)
    assert error.errno == number
    assert "free some space" in str(error)


def test_the_message_speaks_of_no_key_that_the_caller_did_not_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="the storage folder cannot be used") as caught:
        StoreFolder.create(tmp_path / "file", rank=0)
    assert "nvme_path" not in str(caught.value)


@pytest.fixture
def foreign_folder() -> Iterator[Path]:
    """Return a folder that may be read and not written to, while the process is not the superuser."""
    user = os.geteuid()
    outer = Path(tempfile.mkdtemp(dir="/tmp"))
    inner = outer / "inner"
    inner.mkdir()
    inner.chmod(0o555)
    outer.chmod(0o755)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield inner
    finally:
        os.seteuid(user)
        inner.chmod(0o755)
        shutil.rmtree(outer)


def test_a_root_without_permission(foreign_folder: Path) -> None:
    for root in (foreign_folder, foreign_folder / "a" / "b"):
        error = refusal(root, foreign_folder)
        assert error.errno == errno.EACCES
        assert "no permission to write there; give a folder that you may write to" in str(error)


@AS_ROOT
def test_users_who_share_a_root_share_the_folder_of_stores(caplog: pytest.LogCaptureFixture) -> None:
    outer = Path(tempfile.mkdtemp(dir="/tmp"))
    shared = outer / "nvme"
    shared.mkdir()
    try:
        outer.chmod(0o755)
        shared.chmod(0o1777)
        with StoreFolder.create(shared, rank=0) as of_root:
            os.seteuid(NOBODY)
            try:
                with StoreFolder.create(shared, rank=0) as of_nobody:
                    assert stores(shared) == {of_root.path.name, of_nobody.path.name}
            finally:
                os.seteuid(0)
        assert stores(shared) == set()
        assert messages(caplog, logging.WARNING) == []
    finally:
        shutil.rmtree(outer)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    """Mounts one where the test may; there must be no difference between its top and what would lie below."""
    mount = 'mount -t tmpfs -o ro none "$0"'
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount, tmp_path], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no private mount here: {probe.stderr.decode().strip()}")
    code = f"""
import sys
from pathlib import Path
from peftds_ext.errors import StorageError
from peftds_ext.store.folder import StoreFolder
for root in (Path(sys.argv[1]), Path(sys.argv[1], "a", "b")):
    try:
        StoreFolder.create(root, rank=0, what={KEY!r})
    except StorageError as error:
        print(error)
"""
    command = f'{mount} && exec "$@"'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, tmp_path, sys.executable, "-c", code, tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(
            f"[Errno {errno.EROFS}] {KEY} cannot be used: it is on a read-only file system"
        )


@pytest.mark.parametrize(("made_by", "reclaimed"), [("this machine", True), ("another machine", False)])
def test_on_a_network_mount_only_this_machines_dead_are_reclaimed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    made_by: str,
    reclaimed: bool,
) -> None:
    monkeypatch.setattr("peftds_ext.store.folder.locate", lambda folder: Location("nfs4", Media.NETWORK))
    dead = dead_store(tmp_path)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    (dead / LOCK_NAME).write_bytes(boot_id if made_by == "this machine" else b"some other boot id")
    with StoreFolder.create(tmp_path, rank=0) as store:
        assert (store.path / LOCK_NAME).read_bytes() == boot_id
        assert dead.exists() is not reclaimed
    assert ("made by another machine" in caplog.text) is not reclaimed
