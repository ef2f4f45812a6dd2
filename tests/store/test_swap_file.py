# SPDX-License-Identifier: Apache-2.0
"""The swap file: what is read is what was written, whatever goes wrong, and the manifest is never wrong."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c_reference import crc32c_blocks
from torch import Tensor

import peftds_ext
from peftds_ext import _native
from peftds_ext.errors import CorruptDataError, StorageError, StorageFullError
from peftds_ext.store import swap_file as swap_file_module
from peftds_ext.store.engine import IoSettings, StorageEngine
from peftds_ext.store.folder import DATA_NAME, SWAP_NAME, StoreFolder
from peftds_ext.store.manifest import read_manifest
from peftds_ext.store.swap_file import SwapFile
from peftds_ext.store.verify import verify

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8]
SIZES = [1, 3, 2048, 2049, 100_003, (1 << 20) + 1]
BLOCK = 1 << 20


def filled(numel: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    """Return random bits as a tensor, NaNs of any kind among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(torch.uint8))


@dataclass
class Store:
    folder: StoreFolder
    engine: StorageEngine
    file: SwapFile

    def read(self, key: str) -> Tensor:
        return self.file.fetch(key).wait()

    def told(self) -> dict[str, tuple[int, ...] | None]:
        """Return the checksums by key that the manifest on the disk tells."""
        return {record.key: record.crc32c for record in read_manifest(self.folder.path).records}

    def flip(self, position: int) -> None:
        """Change one byte of the data file as somebody else would."""
        with self.folder.data_path.open("r+b") as file:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 0x10]))
            os.fsync(file.fileno())


Make = Callable[..., Store]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that makes stores; they are closed afterwards, and must leave nothing behind."""
    made: list[Store] = []

    def make(faults: str = "", **changes: Any) -> Store:
        monkeypatch.setenv("PEFTDS_IO_FAULTS", faults)
        settings = {"engine": None, "queue_depth": 4, "block_bytes": 256 << 10, "direct": True}
        engine = StorageEngine(IoSettings(**{**settings, "checksum": "first", **changes}))
        folder = StoreFolder.create(tmp_path, rank=0)
        made.append(Store(folder, engine, SwapFile(folder, engine)))
        return made[-1]

    yield make
    for store in made:
        store.file.close()
        assert not store.folder.path.exists()


@pytest.fixture
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish the manifest whenever it has changed, and not after a pause."""
    monkeypatch.setattr(swap_file_module, "_PUBLISH_SECONDS", 0.0)


# what is written is read


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_records_come_back_bit_for_bit(make: Make, dtype: torch.dtype, direct: bool) -> None:
    store = make(direct=direct)
    records = {f"of {size}": filled(size, dtype, seed=size) for size in SIZES}
    for key, tensor in records.items():
        assert key not in store.file
        store.file.write(key, tensor)
        assert key in store.file
    for _ in range(2):
        for key, tensor in records.items():
            assert same(store.read(key), tensor)
            assert same(store.file.fetch(key, ahead=True).wait(), tensor)
            destination = torch.empty_like(tensor)
            store.file.read_into(key, destination)
            assert same(destination, tensor)
            assert store.file.holds(key, tensor)
    assert store.file.size == store.folder.data_path.stat().st_size
    assert store.file.size % 4096 == 0


def test_shape_and_layout_do_not_matter_when_writing(make: Make) -> None:
    store = make()
    tensor = filled(30_000, torch.float32).reshape(300, 100)
    store.file.write("transposed", tensor.t().requires_grad_())
    assert same(store.read("transposed"), tensor.t().reshape(-1))
    store.file.write("matrix", tensor)
    matrix = torch.empty(100, 300)
    store.file.read_into("matrix", matrix)
    assert same(matrix.view(-1), tensor.view(-1))
    store.file.write("scalar", torch.tensor(2.5))
    assert store.read("scalar").tolist() == [2.5]


def test_a_pending_read_knows_its_size_and_may_be_waited_for_twice(make: Make) -> None:
    store = make()
    store.file.write("a", filled(1000, torch.bfloat16))
    read = store.file.fetch("a")
    assert read.wait().nbytes == 2000
    assert same(read.wait(), read.wait())


def test_a_record_keeps_its_place_when_it_is_rewritten(make: Make) -> None:
    store = make()
    for key in "abc":
        store.file.write(key, filled(5000, seed=ord(key)))
    size = store.file.size
    for seed in range(4):
        store.file.write("b", filled(5000, seed=seed))
        assert same(store.read("b"), filled(5000, seed=seed))
    assert store.file.size == size
    for key in "ac":
        assert same(store.read(key), filled(5000, seed=ord(key)))


def test_holds_sees_one_bit(make: Make) -> None:
    store = make()
    tensor = filled((9 << 20) + 5)
    store.file.write("a", tensor)
    assert store.file.holds("a", tensor)
    assert store.file.holds("a", tensor.clone())
    for position in (0, BLOCK, 8 << 20, tensor.numel() - 1):
        other = tensor.clone()
        other[position] ^= 1
        assert not store.file.holds("a", other)
    assert not store.file.holds("b", tensor)
    assert not store.file.holds("a", tensor[:-1])
    assert not store.file.holds("a", tensor.view(torch.int8))
    zero = torch.zeros(10)
    store.file.write("zero", zero)
    assert not store.file.holds("zero", -zero)  # equal as numbers, not as bits


def test_holds_does_not_take_the_checksums_word_for_it(make: Make) -> None:
    store = make()
    tensor = filled(10_000)
    store.file.write("a", tensor)
    store.flip(7)
    assert not store.file.holds("a", tensor)
    store.file.write("a", tensor)
    assert store.file.holds("a", tensor)


def test_wrong_use(make: Make) -> None:
    store = make()
    store.file.write("a", filled(10, torch.float32))
    with pytest.raises(KeyError):
        store.file.fetch("b")
    for wrong in (filled(9, torch.float32), filled(20, torch.float16)):
        with pytest.raises(ValueError, match=r"record 'a' holds 10 elements of torch\.float32, not"):
            store.file.write("a", wrong)
        with pytest.raises(ValueError, match=r"record 'a' holds 10 elements of torch\.float32, not"):
            store.file.read_into("a", wrong)
    with pytest.raises(ValueError, match="contiguous"):
        store.file.read_into("a", torch.empty(20)[::2])
    assert same(store.read("a"), filled(10, torch.float32))


def test_many_threads_at_once(make: Make) -> None:
    store = make()
    failures: list[str] = []

    def work(number: int) -> None:
        for turn in range(12):
            tensor = filled(20_000 + number, torch.bfloat16, seed=100 * number + turn)
            store.file.write(f"of {number}", tensor)
            if not same(store.read(f"of {number}"), tensor):
                failures.append(f"{number} in turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# checksums


@pytest.mark.parametrize("policy", ["first", "always", "off"])
def test_a_byte_that_changes_before_the_first_read(make: Make, policy: str) -> None:
    store = make(checksum=policy)
    tensor = filled(3 * BLOCK + 100)
    store.file.write("before", filled(10))
    store.file.write("a", tensor)
    store.flip(4096 + 2 * BLOCK + 9)
    if policy == "off":
        assert (store.read("a") != tensor).nonzero().tolist() == [[2 * BLOCK + 9]]
        return
    for read in (lambda: store.read("a"), lambda: store.file.read_into("a", torch.empty_like(tensor))):
        with pytest.raises(CorruptDataError) as caught:
            read()
        text = str(caught.value)
        assert f"{store.file.path}: record 'a', block of {BLOCK} bytes at offset {4096 + 2 * BLOCK}" in text
        assert re.search(r"checksum is 0x[0-9a-f]{8}, written was 0x[0-9a-f]{8}", text)
        assert "start the run again" in text
    assert same(store.read("before"), filled(10))
    store.file.write("a", tensor)
    assert same(store.read("a"), tensor)


@pytest.mark.parametrize(("policy", "found"), [("first", False), ("always", True), ("off", False)])
def test_a_byte_that_changes_after_the_first_read(make: Make, policy: str, found: bool) -> None:
    store = make(checksum=policy)
    tensor = filled(5000)
    store.file.write("a", tensor)
    assert same(store.read("a"), tensor)
    store.flip(4999)
    if found:
        with pytest.raises(CorruptDataError, match="at offset 0"):
            store.read("a")
    else:
        assert (store.read("a") != tensor).nonzero().tolist() == [[4999]]


def test_the_first_read_after_each_write_is_compared(make: Make) -> None:
    store = make(checksum="first")
    for seed in range(3):
        store.file.write("a", filled(5000, seed=seed))
        store.flip(0)
        with pytest.raises(CorruptDataError):
            store.read("a")
        store.flip(0)
        assert same(store.read("a"), filled(5000, seed=seed))


@pytest.mark.parametrize("policy", ["always", "off"])
def test_a_file_that_was_cut(make: Make, policy: str) -> None:
    store = make(checksum=policy)
    store.file.write("a", filled(5000))
    store.file.write("b", filled(500_000))
    os.truncate(store.folder.data_path, 8192 + 100_000)
    with pytest.raises(CorruptDataError) as caught:
        store.read("b")
    assert "shorter than it was" in str(caught.value)
    assert str(store.file.path) in str(caught.value)
    assert same(store.read("a"), filled(5000))
    store.file.write("b", filled(500_000))
    assert same(store.read("b"), filled(500_000))


# the manifest


def true_checksums(store: Store) -> dict[str, tuple[int, ...]]:
    """Return the checksums by key of the bytes that are in the data file."""
    data = store.folder.data_path.read_bytes()
    checksums = _native.core().crc32c_blocks
    return {
        record.key: tuple(checksums(data[record.offset : record.end], BLOCK))
        for record in read_manifest(store.folder.path).records
    }


def check_manifest(store: Store) -> None:
    told, true = store.told(), true_checksums(store)
    for key, checksums in told.items():
        assert checksums in (None, true[key]), key
    (report,) = verify(store.folder.path)
    assert report.intact, report.damage


@pytest.mark.usefixtures("_no_pause")
@pytest.mark.parametrize("seed", range(6))
def test_the_manifest_never_tells_a_checksum_that_is_wrong(make: Make, seed: int) -> None:
    faults = "" if seed % 2 else f"write:eio@p0.1;write:short@p0.2;seed={seed}"
    store = make(faults=faults, block_bytes=64 << 10)
    check_manifest(store)
    choose = random.Random(seed)
    content: dict[str, Tensor | None] = {}
    with_checksums = 0
    for step in range(60):
        key = f"of {choose.randrange(6)}"
        if key not in content or choose.random() < 0.5:
            numel = content[key].numel() if content.get(key) is not None else 1000 * (1 + len(content))
            if key in content and content[key] is None:
                numel = int(store.file._extents[key].numel)
            tensor = filled(numel, seed=step)
            try:
                store.file.write(key, tensor)
                content[key] = tensor
            except StorageError:
                content[key] = None
        elif content[key] is None:
            with pytest.raises(StorageError, match="its last write failed"):
                store.read(key)
        else:
            assert same(store.read(key), content[key])
        check_manifest(store)
        with_checksums += sum(checksums is not None for checksums in store.told().values())
    assert with_checksums > 60  # it does tell


@pytest.mark.usefixtures("_no_pause")
def test_the_manifest_never_tells_of_a_write_that_is_under_way(make: Make) -> None:
    store = make(faults="write:delay=300@3", engine="threads")  # a delay there keeps nobody else waiting
    store.file.write("a", filled(5000))
    store.file.write("b", filled(5000))
    store.read("a")
    assert all(checksums is not None for checksums in store.told().values())
    thread = threading.Thread(target=store.file.write, args=("b", filled(5000, seed=1)))
    thread.start()
    seen = [store.told()["b"]]
    while thread.is_alive():
        store.read("a")
        told = store.told()["b"]
        if thread.is_alive() and told != seen[-1]:
            seen.append(told)
    thread.join()
    assert None in seen
    assert len(seen) <= 2  # what was there before, and nothing from then on
    store.read("a")
    check_manifest(store)
    assert store.told()["b"] is not None


@pytest.mark.usefixtures("_no_pause")
def test_what_a_failed_write_left_is_told_of_without_checksums(make: Make) -> None:
    store = make(faults="write:eio@3")
    store.file.write("a", filled(5000))
    store.file.write("b", filled(5000))
    store.read("a")
    with pytest.raises(StorageError):
        store.file.write("b", filled(5000, seed=1))
    store.read("a")
    assert store.told() == {"a": true_checksums(store)["a"], "b": None}
    store.file.write("b", filled(5000, seed=2))
    store.read("a")
    assert store.told() == true_checksums(store)


def test_the_manifest_says_what_the_file_is(make: Make) -> None:
    store = make()
    store.file.write("a", filled(1000, torch.bfloat16))
    store.file.write("b", filled(7))
    store.file._manifest._next = 0.0  # the pause is over
    store.read("a")
    manifest = read_manifest(store.folder.path)
    assert (manifest.data_file, manifest.file_bytes, manifest.block_bytes) == (DATA_NAME, 8192, BLOCK)
    assert (manifest.rank, manifest.world_size, manifest.pid) == (0, 1, os.getpid())
    a, b = manifest.records
    assert (a.key, a.dtype, a.shape, a.offset, a.nbytes) == ("a", "bfloat16", (1000,), 0, 2000)
    assert (b.key, b.dtype, b.shape, b.offset, b.nbytes) == ("b", "uint8", (7,), 4096, 7)
    assert list(b.crc32c or ()) == crc32c_blocks(bytes(filled(7).tolist()), BLOCK)


def test_a_manifest_is_not_written_anew_at_each_operation(make: Make) -> None:
    store = make()
    path = store.folder.path / "manifest.json"
    versions = {path.stat().st_ino}
    for seed in range(50):
        store.file.write(f"of {seed}", filled(100, seed=seed))
        store.read(f"of {seed}")
        versions.add(path.stat().st_ino)
    assert len(versions) <= 2


# memory


def test_held_memory_stays_close_to_what_is_in_use(make: Make) -> None:
    store = make()
    choose = random.Random(0)
    for number in range(20):
        store.file.write(f"of {number}", filled(choose.randrange(1, 400_000), seed=number))
    kept: list[Tensor] = []
    for _ in range(300):
        kept.append(store.read(f"of {choose.randrange(20)}"))
        if len(kept) > 6:
            kept.pop(choose.randrange(len(kept)))
        usage = store.engine.arena.usage()
        assert usage.peak_held <= 1.05 * usage.peak_live
    kept.clear()
    assert store.engine.arena.usage().live == 0


# the end


def test_closing_removes_everything_and_may_be_repeated(make: Make, tmp_path: Path) -> None:
    store = make()
    store.file.write("a", filled(5000))
    pending = store.file.fetch("a", ahead=True)
    tensor = pending.wait()
    store.file.close()
    store.file.close()
    assert not store.folder.path.exists()
    assert sorted(p.name for p in (tmp_path / SWAP_NAME).iterdir()) == [".lock"]
    assert same(tensor, filled(5000))  # memory that was handed out stays
    assert store.engine.method == "closed"


def test_no_descriptor_stays_open_after_closing(make: Make, tmp_path: Path) -> None:
    """An open file would go on taking its room on the disk, and its folder would stay on network mounts."""
    store = make()
    store.file.write("a", filled(5000))
    tensor = store.read("a")
    store.file.close()
    open_files = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(str(tmp_path)):
            open_files.append(target)
    assert open_files == []
    assert same(tensor, filled(5000))


def test_nothing_is_read_or_written_after_closing(make: Make) -> None:
    store = make()
    store.file.write("a", filled(5000))
    store.file.close()
    for use in (lambda: store.read("a"), lambda: store.file.write("a", filled(5000))):
        with pytest.raises((ValueError, StorageError), match="closed"):
            use()


# writes that fail


@pytest.mark.parametrize(
    ("fault", "kind", "number", "remedy"),
    [
        ("eio", StorageError, errno.EIO, "see the kernel's log"),
        ("enospc", StorageFullError, errno.ENOSPC, "free space on the disk or choose another folder"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["the first", "a later one"])
def test_a_write_that_fails(
    make: Make, fault: str, kind: type[StorageError], number: int, remedy: str, first: bool
) -> None:
    store = make(faults=f"write:{fault}@{2 if first else 3}")
    store.file.write("other", filled(3000))
    if not first:
        store.file.write("a", filled(5000))
    with pytest.raises(StorageError) as caught:
        store.file.write("a", filled(5000, seed=1))
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert caught.value.filename == str(store.file.path)
    assert remedy in str(caught.value)
    assert re.search(r"write of \d+ bytes at offset 4096", str(caught.value))
    for read in (
        lambda: store.read("a"),
        lambda: store.file.fetch("a", ahead=True),
        lambda: store.file.read_into("a", torch.empty(5000, dtype=torch.uint8)),
    ):
        with pytest.raises(StorageError) as caught:
            read()
        assert f"{store.file.path}: record 'a' cannot be read, since its last write failed" in str(
            caught.value
        )
        assert "start the run again from its last checkpoint" in str(caught.value)
    assert not store.file.holds("a", filled(5000, seed=1))
    assert same(store.read("other"), filled(3000))
    store.file.write("a", filled(5000, seed=2))
    assert same(store.read("a"), filled(5000, seed=2))


def test_a_read_that_fails_may_be_repeated(make: Make) -> None:
    store = make(faults="read:eio@1")
    store.file.write("a", filled(5000))
    with pytest.raises(StorageError) as caught:
        store.read("a")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(store.file.path))
    assert same(store.read("a"), filled(5000))


def test_short_interrupted_and_reordered_transfers_do_not_show(make: Make) -> None:
    store = make(
        faults="any:short@p0.3;any:eintr@p0.3;any:reorder@p0.2;any:delay=1@p0.1;seed=3",
        block_bytes=16 << 10,
        checksum="always",
    )
    for number in range(8):
        store.file.write(f"of {number}", filled(200_001 + number, torch.bfloat16, seed=number))
    reads = [store.file.fetch(f"of {number}", ahead=number % 2 == 0) for number in range(8)]
    for number in reversed(range(8)):
        assert same(reads[number].wait(), filled(200_001 + number, torch.bfloat16, seed=number))


# a disk that is full

FULL = """
import errno, logging, os, sys
from pathlib import Path
import torch
from peftds_ext.errors import StorageFullError
from peftds_ext.store import swap_file
from peftds_ext.store.engine import IoSettings, StorageEngine
from peftds_ext.store.folder import StoreFolder
from peftds_ext.store.swap_file import SwapFile
from peftds_ext.store.verify import verify

swap_file._PUBLISH_SECONDS = 0.0
messages = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("peftds_ext").addHandler(handler)
root = Path(sys.argv[1])
folder = StoreFolder.create(root, rank=0)
file = SwapFile(folder, StorageEngine(IoSettings(None, 4, 65536, True, "always")))

def record(number):
    return torch.arange(300_000, dtype=torch.int32) + number

written = 0
while True:
    try:
        file.write(f"of {written}", record(written))
        written += 1
    except StorageFullError as error:
        assert error.errno == errno.ENOSPC and error.filename == str(folder.data_path), error
        assert "bytes are free" in str(error), error
        assert "free space on the disk or choose another folder" in str(error), error
        break
assert written >= 2, written
assert f"of {written}" not in file
size = file.size
filler = root / "filler"
with filler.open("wb", buffering=0) as out:
    try:
        while True:
            out.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
for turn in range(2):  # what was there can be read, and rewritten in place
    for number in range(written):
        assert torch.equal(file.fetch(f"of {number}").wait(), record(number))
    if turn == 0 and sys.argv[2] == "rewrite":
        file.write("of 0", record(0))
try:
    file.write("one more", record(0))
except StorageFullError:
    pass
else:
    raise SystemExit("there was room")
filler.unlink()
file.write("small", record(0)[:100])
for _ in range(2):  # what was rewritten is told of once it has stayed as it is for one more time
    assert torch.equal(file.fetch("small").wait(), record(0)[:100])
(report,) = verify(folder.path)
assert report.intact and report.checked_records == report.records == written + 1, report
file.close()
assert [path.name for path in root.iterdir()] == ["peftds_ext_swap"]
(message,) = messages
assert "manifest" in message and "No space left" in message and "peftds verify" in message, message
print("done", written)
"""


@pytest.mark.parametrize("rewrite", ["rewrite", "read"])
def test_a_disk_that_is_full(tmp_path: Path, rewrite: str) -> None:
    """Space is taken at the first write: that is where a full disk is met, and nothing is lost."""
    mount = 'mount -t tmpfs -o size=4m none "$0"'
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount, tmp_path], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no private mount here: {probe.stderr.decode().strip()}")
    paths = [str(Path(peftds_ext.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    inside = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', tmp_path]
    run = subprocess.run(
        [*inside, sys.executable, "-c", FULL, tmp_path, rewrite],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "done 3\n"


@pytest.mark.usefixtures("_no_pause")
def test_what_is_rewritten_all_the_time_does_not_hide_the_rest(make: Make) -> None:
    store = make()
    for key in ("frozen", "trainable"):
        store.file.write(key, filled(1000, torch.bfloat16))
    for turn in range(6):
        store.read("frozen")
        store.file.write("trainable", filled(1000, torch.bfloat16) * turn)
    store.read("frozen")
    (report,) = verify(store.folder.path)
    assert report.intact
    assert report.checked_records == 1
    assert report.skipped == ("trainable",)
