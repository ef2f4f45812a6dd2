# SPDX-License-Identifier: Apache-2.0
"""The compiled storage engine from Python: bytes, lifetimes of memory, interruption, fork, refusals."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peftds_ext import _native
from peftds_ext.errors import ConfigError, CorruptDataError, StorageError

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from crc32c_reference import crc32c_blocks

core = _native.core()
READ, WRITE = core.Direction.READ, core.Direction.WRITE
CREATE = core.Access.CREATE
PAGE = 4096
SHARED_MEMORY = Path("/dev/shm")

PER_EXAMPLE, EXAMPLES = 250, 20
PROMISED = 10_000
"""Extents per engine and file system, half of them past the page cache."""


def _methods() -> list[Any]:
    """Return the engines, those that this machine does not allow marked as skipped."""
    try:
        core.Engine(method="io_uring").close()
    except ConfigError as error:
        return ["threads", pytest.param("io_uring", marks=pytest.mark.skip(reason=str(error)))]
    return ["threads", "io_uring"]


METHODS = _methods()


@pytest.fixture(params=["disk", "shm"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder of the disk, and one in shared memory."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip(f"{SHARED_MEMORY} is not to be had")
    path = SHARED_MEMORY / f"peftds_ext_test_{secrets.token_hex(6)}"
    path.mkdir()
    try:
        yield path
    finally:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """A file of 64 KiB that counts up."""
    path = tmp_path / "counting"
    path.write_bytes(bytes(range(256)) * 256)
    return core.File(str(path), core.Access.UPDATE)


def extent(file: Any, offset: int, tensor: torch.Tensor) -> tuple[Any, int, int, int]:
    return (file, offset, tensor.data_ptr(), tensor.nbytes)


def transfer(engine: Any, direction: Any, file: Any, offset: int, tensor: torch.Tensor) -> Any:
    return engine.submit(direction, [extent(file, offset, tensor)], keep_alive=tensor)


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


# any offset, size and alignment

_around = st.builds(
    lambda pages, slip: max(1, pages * PAGE + slip), st.integers(0, 5), st.sampled_from([-1, 0, 0, 0, 1, 511])
)
SIZES = st.one_of(st.integers(1, 300), st.integers(1, 3 * PAGE), _around)
SLIPS = st.one_of(st.just(0), st.integers(0, PAGE - 1), st.sampled_from([0, 1, 8, 512, PAGE - 1]))
GAPS = st.one_of(st.just(0), st.integers(0, 600), st.sampled_from([0, 1, 512, PAGE - 1, PAGE]))
BATCHES = st.lists(st.tuples(GAPS, SIZES, SLIPS, st.booleans()), min_size=PER_EXAMPLE, max_size=PER_EXAMPLE)


class Layout:
    """Where the extents of one batch lie in the file, one after another, and in memory, with room around."""

    def __init__(self, batch: list[tuple[int, int, int, bool]]) -> None:
        self.places: list[tuple[int, int, int]] = []
        offset = start = 0
        for gap, size, slip, to_page in batch:
            offset = -(-offset // PAGE) * PAGE if to_page else offset + gap
            self.places.append((offset, start + slip, size))
            offset += size
            start = -(-(start + slip + size + 1) // PAGE) * PAGE
        self.file_bytes, self.memory_bytes = offset, start + PAGE

    def memory(self) -> torch.Tensor:
        """Return memory that begins at a page."""
        whole = torch.full((self.memory_bytes + PAGE,), 0xA5, dtype=torch.uint8)
        return whole[-whole.data_ptr() % PAGE :][: self.memory_bytes]

    def extents(self, file: Any, memory: torch.Tensor) -> list[tuple[Any, int, int, int]]:
        return [extent(file, offset, memory[start : start + size]) for offset, start, size in self.places]


def _check_batch(engine: Any, path: Path, direct: bool, batch: list[Any], seed: int) -> None:
    layout = Layout(batch)
    random = np.random.default_rng(seed)
    before = random.integers(0, 256, layout.file_bytes, dtype=np.uint8)
    path.write_bytes(before.tobytes())
    file = core.File(str(path), core.Access.UPDATE, direct=direct)
    assert file.direct == direct, file.why_buffered

    source = layout.memory()
    source.numpy()[:] = random.integers(0, 256, source.numel(), dtype=np.uint8)
    order = random.permutation(len(batch))
    extents = layout.extents(file, source)
    engine.submit(WRITE, [extents[i] for i in order], keep_alive=source).wait()
    written = before.copy()
    for offset, start, size in layout.places:
        written[offset : offset + size] = source.numpy()[start : start + size]
    plain = np.frombuffer(path.read_bytes(), np.uint8)
    assert np.array_equal(plain, written)

    target = layout.memory()
    expected = target.numpy().copy()
    for offset, start, size in layout.places:
        expected[start : start + size] = plain[offset : offset + size]
    extents = layout.extents(file, target)
    engine.submit(READ, [extents[i] for i in order], keep_alive=target).wait()
    assert np.array_equal(target.numpy(), expected)  # what lies between the extents as well


@pytest.mark.parametrize("method", METHODS)
def test_extents_are_what_a_plain_read_gives(method: str, folder: Path) -> None:
    count = 0
    names = itertools.count()

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(batch=BATCHES, seed=st.integers(0, 1 << 32), depth=st.integers(1, 16), pages=st.integers(1, 4))
    def check(direct: bool, batch: list[Any], seed: int, depth: int, pages: int) -> None:
        nonlocal count
        engine = core.Engine(method=method, queue_depth=depth, block_bytes=pages * PAGE)
        path = folder / f"extents{next(names)}"
        try:
            _check_batch(engine, path, direct, batch, seed)
        finally:
            engine.close()
            path.unlink()
        count += len(batch)

    for direct in (True, False):
        check(direct)
    assert count >= PROMISED


def test_extents_of_several_files_and_empty_ones_in_one_vector(engine: Any, tmp_path: Path) -> None:
    files = [core.File(str(tmp_path / name), CREATE) for name in "abc"]
    sources = [torch.full((PAGE,), value, dtype=torch.uint8) for value in (1, 2, 3)]
    extents = [extent(f, 0, t) for f, t in zip(files, sources, strict=True)]
    engine.submit(WRITE, [*extents, (files[0], 7, 0, 0)], keep_alive=sources).wait()
    for file, source in zip(files, sources, strict=True):
        assert Path(file.path).read_bytes() == bytes(source.tolist())
    nothing = engine.submit(READ, [(files[0], 1 << 40, 0, 0)], keep_alive=None)
    nothing.wait()
    assert nothing.done()


# tickets


def test_a_ticket_may_be_waited_for_again(engine: Any, file: Any) -> None:
    target = zeros(300)
    ticket = transfer(engine, READ, file, 5, target)
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert target.tolist() == [(5 + i) % 256 for i in range(300)]


def test_every_wait_tells_of_the_failure(file: Any) -> None:
    engine = core.Engine(faults="read:eio@1")
    ticket = transfer(engine, READ, file, 0, zeros(10))
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == file.path
        assert "read of 4096 bytes at offset 0" in str(caught.value)
        assert "dmesg" in str(caught.value)
    assert ticket.done()
    transfer(engine, READ, file, 0, zeros(10)).wait()


@pytest.mark.parametrize("method", METHODS)
def test_dropping_a_ticket_in_flight_keeps_its_memory_until_the_end(method: str, file: Any) -> None:
    engine = core.Engine(method=method, faults="read:delay=1500@1")
    arena = engine.make_arena()
    target = torch.frombuffer(arena.allocate(PAGE), dtype=torch.uint8)
    address, gone = target.data_ptr(), weakref.ref(target)
    ticket = transfer(engine, READ, file, 0, target)
    del target
    assert gone() is not None
    other = torch.frombuffer(arena.allocate(PAGE), dtype=torch.uint8)
    assert other.data_ptr() != address
    other.fill_(7)
    assert not ticket.done()
    del ticket  # waits
    assert gone() is None
    assert arena.usage().live == PAGE
    again = torch.frombuffer(arena.allocate(PAGE), dtype=torch.uint8)
    assert again.data_ptr() == address  # the transfer wrote there, and nobody else had it meanwhile
    assert again.tolist() == list(range(256)) * (PAGE // 256)
    assert set(other.tolist()) == {7}


def test_demand_overtakes_what_is_read_ahead(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * PAGE))
    file = core.File(str(path), core.Access.READ)
    engine = core.Engine(queue_depth=1, block_bytes=PAGE, faults="read:delay=10@1+")
    ahead = engine.submit(
        READ,
        [extent(file, 0, large := zeros(64 * PAGE))],
        keep_alive=large,
        priority=core.Priority.READ_AHEAD,
    )
    transfer(engine, READ, file, 0, zeros(PAGE)).wait()
    assert not ahead.done()
    ahead.wait()


def test_ctrl_c_ends_a_wait_at_once(run_python: Callable[..., str], file: Any) -> None:
    output = run_python(
        f"""
import os, signal, threading, time
import torch
from peftds_ext import _native
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it from the start
core = _native.core()
engine = core.Engine(faults="read:delay=6000@1")
file = core.File({file.path!r}, core.Access.READ)
target = torch.zeros(100, dtype=torch.uint8)
sent = []

def interrupt():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

threading.Timer(0.3, interrupt).start()
ticket = engine.submit(
    core.Direction.READ, [(file, 0, target.data_ptr(), 100)], keep_alive=target)
try:
    ticket.wait()
    raise SystemExit("the wait ended by itself")
except KeyboardInterrupt:
    took = time.monotonic() - sent[0]
assert took < 3.0, took
assert not ticket.done()
ticket.wait()  # the transfer goes on, and may be waited for again
assert target.tolist() == list(range(100))
print("interrupted")
"""
    )
    assert output == "interrupted\n"


def test_other_threads_of_python_run_during_a_wait(file: Any) -> None:
    import threading

    engine = core.Engine(faults="read:delay=1500@1")
    ticket = transfer(engine, READ, file, 0, zeros(10))
    turns: list[float] = []
    thread = threading.Thread(target=lambda: [turns.append(time.monotonic()) for _ in range(100)])
    thread.start()
    ticket.wait()
    ended = time.monotonic()
    thread.join()
    assert turns[-1] < ended


# memory


def test_a_tensor_keeps_the_buffer_and_the_arena_alive() -> None:
    arena = core.Arena()
    tensor = torch.frombuffer(arena.allocate(3 * PAGE), dtype=torch.float32)
    assert tensor.data_ptr() % PAGE == 0
    assert arena.usage().live == 3 * PAGE
    del arena
    tensor.fill_(1.5)
    assert float(tensor.sum()) == 1.5 * 3 * PAGE / 4


def test_memory_of_a_kept_view_is_not_given_away() -> None:
    arena = core.Arena()
    for size in (1, 100, PAGE, 5 * PAGE + 3):
        tensor = torch.frombuffer(arena.allocate(size), dtype=torch.uint8)
        tensor.fill_(9)
        address = tensor.data_ptr()
        view = tensor[size // 2 :].view(-1)
        del tensor
        others = [torch.frombuffer(arena.allocate(size), dtype=torch.uint8).fill_(1) for _ in range(20)]
        assert address not in [other.data_ptr() for other in others]
        assert set(view.tolist()) == {9}
        live = arena.usage().live
        del view
        assert arena.usage().live == live - -(-size // PAGE) * PAGE
        del others
    assert arena.usage().live == 0


def test_what_autograd_saved_keeps_its_memory() -> None:
    arena = core.Arena()
    weight = torch.frombuffer(arena.allocate(PAGE), dtype=torch.float32).fill_(3.0)
    x = torch.ones(PAGE // 4, requires_grad=True)
    product = (x * weight).sum()
    address = weight.data_ptr()
    del weight
    other = torch.frombuffer(arena.allocate(PAGE), dtype=torch.float32).fill_(-1.0)
    assert other.data_ptr() != address
    product.backward()
    assert x.grad is not None
    assert set(x.grad.tolist()) == {3.0}
    del product
    assert arena.usage().live == PAGE


def test_held_memory_stays_close_to_what_is_in_use() -> None:
    arena = core.Arena()
    random = np.random.default_rng(0)
    kept: list[Any] = []
    for _ in range(2000):
        if kept and (len(kept) > 8 or random.random() < 0.5):
            kept.pop(int(random.integers(len(kept))))
        else:
            kept.append(arena.allocate(int(random.integers(1, 300_000))))
        usage = arena.usage()
        assert usage.live <= usage.held <= usage.peak_held <= 1.05 * usage.peak_live


# wrong arguments


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        ({"method": "aio"}, ValueError, '"io_uring" or "threads", not "aio"'),
        ({"queue_depth": 0}, ValueError, "queue_depth must be from 1 to 1024, got 0"),
        ({"queue_depth": 1025}, ValueError, "got 1025"),
        ({"block_bytes": 0}, ValueError, "block_bytes must be a multiple of 4096"),
        ({"block_bytes": 5000}, ValueError, "got 5000"),
        ({"block_bytes": (1 << 30) + 4096}, ValueError, "at most 1073741824"),
        ({"faults": "read:nonsense@1"}, ConfigError, "PEFTDS_IO_FAULTS: 'read:nonsense@1'"),
        ({"faults": "read:eio"}, ConfigError, "PEFTDS_IO_FAULTS"),
        ({"faults": "seed=x"}, ConfigError, "is not seed=NUMBER"),
        ({"method": 1}, TypeError, ""),
    ],
)
def test_wrong_settings(arguments: dict[str, Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind) as caught:
        core.Engine(**arguments)
    assert word in str(caught.value)


def test_wrong_extents(engine: Any, file: Any) -> None:
    target = zeros(10)
    for offset, address, size in [(-1, target.data_ptr(), 10), (0, target.data_ptr(), -1), (0, 0, 10)]:
        with pytest.raises(ValueError, match="an extent needs a file, memory, and an offset and a size"):
            engine.submit(READ, [(file, offset, address, size)], keep_alive=target)
    with pytest.raises(ValueError, match="an extent needs a file"):
        engine.submit(READ, [(None, 0, target.data_ptr(), 10)], keep_alive=target)
    for wrong in ([(file, 0, -1, 10)], [(file, 0)], [("path", 0, 1, 1)], None):
        with pytest.raises(TypeError):
            engine.submit(READ, wrong, keep_alive=target)
    with pytest.raises(TypeError):
        engine.submit(READ, [extent(file, 0, target)])  # nobody would keep the memory


def test_reading_past_the_end(engine: Any, file: Any) -> None:
    for offset in (65536 - 5, 65536, 1 << 40):
        with pytest.raises(CorruptDataError) as caught:
            transfer(engine, READ, file, offset, zeros(10)).wait()
        assert "shorter than it was" in str(caught.value)
        assert file.path in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    for path, access, number, word in [
        (tmp_path / "missing", core.Access.READ, errno.ENOENT, "check that the folder exists"),
        (tmp_path / "missing", core.Access.UPDATE, errno.ENOENT, "check that the folder exists"),
        (there, CREATE, errno.EEXIST, "another process made it"),
        (there / "below", CREATE, errno.ENOTDIR, ""),
        (tmp_path, core.Access.UPDATE, errno.EISDIR, ""),
    ]:
        with pytest.raises(StorageError) as caught:
            core.File(str(path), access)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
        assert word in str(caught.value)


def test_writing_to_a_file_opened_for_reading(engine: Any, file: Any) -> None:
    only_read = core.File(file.path, core.Access.READ)
    with pytest.raises(StorageError) as caught:
        transfer(engine, WRITE, only_read, 0, zeros(10)).wait()
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, file.path)


def test_wrong_sizes_of_memory() -> None:
    arena = core.Arena()
    for size in (0, -1):
        with pytest.raises(ValueError, match="must have a positive size"):
            arena.allocate(size)
    with pytest.raises(MemoryError, match="memory for a buffer"):
        arena.allocate(1 << 60)
    assert arena.usage().live == 0


def test_a_closed_engine(file: Any) -> None:
    engine = core.Engine()
    done = transfer(engine, READ, file, 0, zeros(10))
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="the storage engine is closed"):
        transfer(engine, READ, file, 0, zeros(10))
    assert engine.method == "closed"
    assert done.done()
    arena = engine.make_arena()
    assert torch.frombuffer(arena.allocate(10), dtype=torch.uint8).numel() == 10


@pytest.mark.parametrize("method", METHODS)
def test_closing_fails_what_has_not_started_and_waits_for_the_rest(method: str, file: Any) -> None:
    engine = core.Engine(method=method, queue_depth=1, faults="read:delay=200@1+")
    targets = [zeros(10) for _ in range(3)]
    tickets = [transfer(engine, READ, file, 0, target) for target in targets]
    engine.close()
    tickets[0].wait()
    assert targets[0].tolist() == list(range(10))
    with pytest.raises(StorageError, match="closed before the transfer ended"):
        tickets[2].wait()
    assert targets[2].tolist() == [0] * 10


def test_no_thread_is_left(file: Any) -> None:
    def threads() -> set[str]:
        return {entry.name for entry in Path("/proc/self/task").iterdir()}

    before = threads()
    for method in ("threads", None):
        engine = core.Engine(method=method, queue_depth=8, block_bytes=PAGE)
        transfer(engine, READ, file, 0, zeros(65536)).wait()
        assert threads() - before
        engine.close()
        assert threads() <= before
        engine = core.Engine(method=method)
        transfer(engine, READ, file, 0, zeros(65536)).wait()
        del engine
        assert threads() <= before


# checksums


@given(
    data=st.binary(max_size=1500), block_bytes=st.integers(1, 700), threads=st.integers(1, 3), skip=st.data()
)
def test_checksums_are_the_reference(data: bytes, block_bytes: int, threads: int, skip: Any) -> None:
    start = skip.draw(st.integers(0, len(data)))
    part = memoryview(data)[start:]
    assert core.crc32c_blocks(part, block_bytes, threads) == crc32c_blocks(part, block_bytes)


def test_checksums_refuse(engine: Any) -> None:
    for wrong in (0, -1):
        with pytest.raises((ValueError, TypeError)):
            core.crc32c_blocks(b"abc", wrong)
    with pytest.raises(ValueError, match="contiguous memory of one dimension"):
        core.crc32c_blocks(np.arange(10, dtype=np.uint8)[::2], 4)
    with pytest.raises(ValueError, match="contiguous memory of one dimension"):
        core.crc32c_blocks(np.zeros((2, 2), np.uint8), 4)
    with pytest.raises(TypeError):
        core.crc32c_blocks("text", 4)


# fork

IN_CHILD = """
import os, sys, time
import torch
from peftds_ext import _native
core = _native.core()
path, method = {path!r}, {method!r}
engine = core.Engine(method=method, faults="read:delay=300@2")
file = core.File(path, core.Access.READ)
arena = engine.make_arena()
target = torch.frombuffer(arena.allocate(100), dtype=torch.uint8)
read = lambda: engine.submit(
    core.Direction.READ, [(file, 0, target.data_ptr(), 100)], keep_alive=target)
read().wait()
pending = read()
pid = os.fork()
if pid == 0:
    {child}
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == 0, status
pending.wait()
read().wait()
assert target.tolist() == list(range(100))
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_child_may_not_use_the_engine_and_ends_as_any_process(
    method: str, file: Any, run_python: Callable[..., str]
) -> None:
    child = """
    try:
        read()
    except ValueError as error:
        assert "made by another process" in str(error), error
    else:
        os._exit(3)
    own = core.Engine(method=method)
    own.submit(core.Direction.READ, [(file, 0, target.data_ptr(), 100)], keep_alive=target).wait()
    own.close()
    engine.close()
    sys.exit(0 if target.tolist() == list(range(100)) else 4)  # destructors and exit handlers run
    """
    run_python(IN_CHILD.format(path=file.path, method=method, child=child))


@pytest.mark.parametrize("method", METHODS)
def test_a_child_may_drop_all_of_it(method: str, file: Any, run_python: Callable[..., str]) -> None:
    child = """
    target.fill_(1)
    del pending, read, file, engine, arena, target
    os._exit(0)
    """
    run_python(IN_CHILD.format(path=file.path, method=method, child=child))


@pytest.mark.parametrize("method", METHODS)
def test_a_child_does_not_wait_for_what_its_parent_reads(
    method: str, file: Any, run_python: Callable[..., str]
) -> None:
    child = """
    import signal
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(10)
    try:
        pending.wait()
    except ValueError as error:
        assert "made by another process" in str(error), error
        os._exit(0)
    os._exit(3)
    """
    run_python(IN_CHILD.format(path=file.path, method=method, child=child))
