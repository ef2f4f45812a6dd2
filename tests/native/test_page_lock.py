# SPDX-License-Identifier: Apache-2.0
"""Page-locked arenas from Python: what the system counts as locked, limits, lifetimes, fork, CUDA."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peftds_ext import _native
from peftds_ext.store.engine import IoSettings, StorageEngine

core = _native.core()
PAGE = 4096
SETTINGS = IoSettings(None, 4, 65536, direct=True, checksum="off")


def locked_bytes() -> int:
    """What the system says that this process has locked by mlock()."""
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.fixture
def arena(engine: Any) -> Any:
    """An arena that locks; the test is skipped where this process may not lock the little that it needs."""
    made = engine.make_arena(core.mlock_page_lock())
    made.allocate(8 * PAGE)
    if made.why_not_locked:
        pytest.skip(made.why_not_locked)
    return engine.make_arena(core.mlock_page_lock())


def test_the_system_counts_what_the_arena_counts(arena: Any) -> None:
    before = locked_bytes()
    first = arena.allocate(3 * PAGE + 1)
    assert (arena.usage().locked, locked_bytes() - before) == (4 * PAGE, 4 * PAGE)
    second = arena.allocate(2 * PAGE)
    assert (arena.usage().locked, locked_bytes() - before) == (6 * PAGE, 6 * PAGE)
    del first
    assert locked_bytes() - before == 6 * PAGE, "what is kept for the next request stays locked"
    third = arena.allocate(5 * PAGE)  # there is no room for it beside the one of 4 pages
    usage = arena.usage()
    assert usage.locked == usage.held == 7 * PAGE == locked_bytes() - before
    assert usage.peak_locked == 7 * PAGE
    assert arena.why_not_locked == ""
    del second, third
    assert locked_bytes() - before == 7 * PAGE


def test_nothing_stays_locked(arena: Any, engine: Any) -> None:
    before = locked_bytes()
    own = engine.make_arena(core.mlock_page_lock())
    tensor = torch.frombuffer(own.allocate(2 * PAGE), dtype=torch.uint8)
    del own
    engine.close()
    tensor.fill_(7)
    assert locked_bytes() - before == 2 * PAGE, "memory outlives its arena and its engine"
    del tensor
    assert locked_bytes() == before


def test_an_arena_locks_nothing_unless_it_is_asked_to(engine: Any) -> None:
    before = locked_bytes()
    for arena in (core.Arena(), engine.make_arena(), engine.make_arena(None)):
        kept = arena.allocate(PAGE)
        assert (arena.usage().locked, arena.usage().peak_locked, arena.why_not_locked) == (0, 0, "")
        assert locked_bytes() == before
        del kept


LIMITED = """
import os, resource, torch
from peftds_ext.store.engine import IoSettings, StorageEngine
from peftds_ext import _native

engine = StorageEngine(IoSettings(None, 4, 65536, True, "off"), _native.core().mlock_page_lock())
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # the limit does not hold for root
small, large = engine.empty(8192, torch.uint8), engine.empty(1_000_000, torch.uint8)
large.fill_(7)
usage = engine.arena.usage()
assert usage.locked == usage.peak_locked == 8192, usage.locked
assert usage.live == 8192 + 1_003_520, usage.live
another = engine.empty(2_000_000, torch.uint8)
print(engine.arena.why_not_locked)
assert int(large.sum()) == 7_000_000
"""


def test_beyond_the_limit_memory_is_used_unlocked_and_the_reason_told(run_python: Callable[..., str]) -> None:
    why = run_python(LIMITED)
    assert "a buffer of 1003520 bytes could not be page-locked" in why
    assert os.strerror(12) in why
    assert "after 8192 bytes that are" in why
    assert "ulimit -l, which is 64 KiB" in why


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < end for start, end in ranges)


def test_a_forked_child_has_memory_of_its_own_and_its_parents_locks_stay(arena: Any) -> None:
    before = locked_bytes()
    unused = torch.frombuffer(arena.allocate(2 * PAGE), dtype=torch.uint8)
    del unused
    tensor = torch.frombuffer(arena.allocate(PAGE), dtype=torch.uint8).fill_(7)
    assert is_mapped(tensor.data_ptr())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            right = not is_mapped(tensor.data_ptr())
            other = torch.frombuffer(arena.allocate(2 * PAGE), dtype=torch.uint8).fill_(1)
            told = arena.why_not_locked
            right = right and arena.usage().locked == locked_bytes() == 0
            del tensor, arena
            right = right and int(other.sum()) == 2 * PAGE
            status = 0 if right and "made by another process" in told else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert arena.usage().locked == PAGE == locked_bytes() - before
    assert int(tensor[0]) == 7


def test_what_is_not_a_page_lock_is_refused(engine: Any) -> None:
    with pytest.raises(ValueError, match=r"_core\.mlock_page_lock\(\) or _cuda\.page_lock\(\)"):
        engine.make_arena(sys.modules["datetime"].datetime_CAPI)
    for wrong in (object(), 5, "mlock"):
        with pytest.raises(TypeError):
            engine.make_arena(wrong)


def test_a_storage_engine_passes_it_on(arena: Any) -> None:
    for page_lock, locked in [(None, 0), (core.mlock_page_lock(), 2 * PAGE)]:
        engine = StorageEngine(SETTINGS, page_lock)
        tensor = engine.empty(PAGE + 1, torch.uint8)
        assert tensor.numel() == PAGE + 1
        assert engine.arena.usage().locked == locked
        engine.close()


# CUDA


def test_there_is_a_cuda_lock_where_the_cuda_module_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()
    monkeypatch.setitem(sys.modules, "peftds_ext._native._cuda", SimpleNamespace(page_lock=lambda: made))
    monkeypatch.setattr(_native, "cuda_status", lambda: (False, "torch sees no CUDA device"))
    assert _native.cuda_page_lock() is None
    monkeypatch.setattr(_native, "cuda_status", lambda: (True, ""))
    assert _native.cuda_page_lock() is made


@pytest.mark.cuda
@pytest.mark.skipif(not _native.cuda_status()[0], reason=_native.cuda_status()[1])
def test_cuda_copies_in_the_background_from_what_is_locked() -> None:
    engine = StorageEngine(SETTINGS, _native.cuda_page_lock())
    values = engine.empty(1 << 20, torch.float32).copy_(torch.arange(1 << 20))
    usage = engine.arena.usage()
    assert usage.locked == usage.held == 4 << 20, engine.arena.why_not_locked
    assert values.is_pinned()
    there = values.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), values)
    del values
    larger = engine.empty(3 << 20, torch.float32)  # the mapping before it is let go
    assert engine.arena.usage().locked == 12 << 20
    assert larger.is_pinned()
    engine.close()
