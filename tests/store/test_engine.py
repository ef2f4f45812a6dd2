# SPDX-License-Identifier: Apache-2.0
"""The storage engine for tensors: settings that are left out, memory, transfers, what it says and refuses."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c_reference import crc32c_blocks

from peftds_ext import _native
from peftds_ext.config import IoConfig
from peftds_ext.errors import ConfigError, StorageError
from peftds_ext.store import engine as engine_module
from peftds_ext.store.engine import IoSettings, StorageEngine, checksums, choose_settings
from peftds_ext.store.media import Location, Media

MIB = 1 << 20
Make = Callable[..., StorageEngine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that makes engines, which are closed afterwards."""
    monkeypatch.delenv("PEFTDS_IO_FAULTS", raising=False)
    made: list[StorageEngine] = []

    def make(**changes: Any) -> StorageEngine:
        settings = {"engine": None, "queue_depth": 4, "block_bytes": 64 << 10, "direct": True}
        engine = StorageEngine(IoSettings(**{**settings, "checksum": "first", **changes}))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Media], None]:
    """Return a function that says what every folder lies on."""
    return lambda media: monkeypatch.setattr(engine_module, "locate", lambda _: Location("any", media))


# settings


def test_ours_come_before_deepspeeds_and_those_before_the_disk(
    tmp_path: Path, disk: Callable[[Media], None]
) -> None:
    disk(Media.ROTATIONAL)
    aio = {"block_size": 2 * MIB, "queue_depth": 16}
    chosen = choose_settings(IoConfig(), tmp_path)
    assert chosen == IoSettings(None, 2, 8 * MIB, True, "first")
    chosen = choose_settings(IoConfig(), tmp_path, aio)
    assert (chosen.queue_depth, chosen.block_bytes) == (16, 2 * MIB)
    chosen = choose_settings(IoConfig(), tmp_path, {"queue_depth": 32})
    assert (chosen.queue_depth, chosen.block_bytes) == (32, 8 * MIB)
    ours = IoConfig(engine="threads", queue_depth=3, block_bytes=4096, direct=False, checksum="always")
    assert choose_settings(ours, tmp_path, aio) == IoSettings("threads", 3, 4096, False, "always")
    disk(Media.MEMORY)
    assert choose_settings(IoConfig(), tmp_path).queue_depth == 4


def test_a_block_size_of_deepspeeds_becomes_whole_pages(tmp_path: Path) -> None:
    for given, taken in [(1, 4096), (4096, 4096), (4097, 8192), (1_000_000, 1_003_520)]:
        assert choose_settings(IoConfig(), tmp_path, {"block_size": given}).block_bytes == taken


@pytest.mark.parametrize(
    ("aio", "key"),
    [
        ({"queue_depth": 1025}, "aio.queue_depth"),
        ({"queue_depth": -1}, "aio.queue_depth"),
        ({"queue_depth": "many"}, "aio.queue_depth"),
        ({"block_size": (1 << 30) + 1}, "aio.block_size"),
        ({"block_size": -4096}, "aio.block_size"),
        ({"block_size": "1MiB"}, "aio.block_size"),
    ],
)
def test_what_the_engine_does_not_take_of_deepspeeds(tmp_path: Path, aio: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_settings(IoConfig(), tmp_path, aio)
    assert str(caught.value).startswith(f"{key}: ")
    assert repr(next(iter(aio.values()))) in str(caught.value)


def test_every_setting_of_the_configuration_reaches_the_engine(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="peftds_ext")
    engine = make(engine="threads", direct=False)
    assert engine.method == "threads"
    assert caplog.messages == []  # asked for, so nothing to explain
    file = engine.create_file(tmp_path / "data")
    assert not file.direct
    assert caplog.messages == []


# what it says


def test_threads_without_being_asked_are_explained(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="peftds_ext")
    engine = make()
    explained = [m for m in caplog.messages if m.startswith("storage engine: threads, since ")]
    assert len(explained) == (engine.method == "threads")


def test_a_file_system_without_direct_access_is_told(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="peftds_ext")
    engine = make()
    native = engine._core.File

    def refused(path: str, access: Any, *, direct: bool) -> Any:
        return native(path, access, direct=False)

    monkeypatch.setattr(engine, "_core", _Core(engine._core, refused))
    engine.create_file(tmp_path / "data")
    (message,) = [m for m in caplog.messages if "page cache" in m]
    assert message.startswith(f"{tmp_path / 'data'} is read and written through the page cache: ")


class _Core:
    def __init__(self, core: Any, file: Any) -> None:
        self._core, self.File = core, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


# transfers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.bool])
def test_bytes_arrive_for_every_dtype(tmp_path: Path, make: Make, dtype: torch.dtype) -> None:
    engine = make()
    file = engine.create_file(tmp_path / "data")
    random = torch.randint(0, 2, (100_003,), dtype=torch.uint8)
    tensor = random.to(dtype)
    engine.write(file, [(0, tensor), (1 << 20, tensor[:17])]).wait()
    whole, part = engine.empty(tensor.numel(), dtype), torch.empty(7, dtype=dtype)
    ticket = engine.read(file, [(0, whole), ((1 << 20) + 3 * dtype.itemsize, part)], ahead=True)
    ticket.wait()
    assert torch.equal(whole, tensor)
    assert torch.equal(part, tensor[3:10])


def test_memory_is_page_aligned_of_its_exact_size_and_comes_back(make: Make) -> None:
    engine = make()
    tensor = engine.empty(1000, torch.bfloat16)
    assert (tensor.numel(), tensor.dtype, tensor.data_ptr() % 4096) == (1000, torch.bfloat16, 0)
    assert tensor.untyped_storage().nbytes() == 2000
    assert engine.arena.usage().live == 4096
    view = tensor[5:]
    del tensor
    assert engine.arena.usage().live == 4096
    del view
    assert engine.arena.usage().live == 0


def test_only_contiguous_host_memory_is_moved(tmp_path: Path, make: Make) -> None:
    engine = make()
    file = engine.create_file(tmp_path / "data")
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(8)[::2], torch.empty(4, device="meta")):
        for move in (engine.read, engine.write):
            with pytest.raises(ValueError, match="contiguous tensors in host memory"):
                move(file, [(0, tensor)])
    assert file.size() == 0


def test_a_file_that_exists_is_not_taken_over(tmp_path: Path, make: Make) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"somebody's")
    with pytest.raises(StorageError) as caught:
        make().create_file(path)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(path))
    assert path.read_bytes() == b"somebody's"


def test_faults_come_from_the_environment(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEFTDS_IO_FAULTS", "write:enospc@2")
    engine = make()
    file = engine.create_file(tmp_path / "data")
    engine.write(file, [(0, torch.zeros(8))]).wait()
    with pytest.raises(StorageError) as caught:
        engine.write(file, [(0, torch.zeros(8))]).wait()
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setenv("PEFTDS_IO_FAULTS", "write:enospc")
    with pytest.raises(ConfigError, match="PEFTDS_IO_FAULTS"):
        make()


def test_io_uring_asked_for_and_not_to_be_had(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is to be had, asking for it gives it."""
    try:
        _native.core().Engine(method="io_uring").close()
    except ConfigError:
        with pytest.raises(ConfigError, match='Use the engine "threads", or leave the choice out'):
            make(engine="io_uring")
    else:
        assert make(engine="io_uring").method == "io_uring"


# checksums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_checksums_of_a_tensor_are_those_of_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(300).reshape(3, 100).to(dtype).requires_grad_(dtype.is_floating_point)
    data = bytes(tensor.detach().view(-1).view(torch.uint8).tolist())
    assert checksums(tensor, 128) == crc32c_blocks(data, 128)
