# SPDX-License-Identifier: Apache-2.0
"""That tensors are found where they lie in safetensors files, and that no hostile file is believed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from peftds_ext.errors import CheckpointError, CorruptDataError, PeftdsError, StorageError
from peftds_ext.store import checkpoint_file
from peftds_ext.store.checkpoint import (
    INDEX_NAME,
    SINGLE_NAME,
    CheckpointTensor,
    check_unchanged,
    read_checkpoint,
    read_tensor,
)
from peftds_ext.store.checkpoint_file import DTYPES, MAX_HEADER_BYTES

NOBODY = 65534
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
REMEDY = "fetch it again"


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bytes; of a bool only 0 and 1 are values."""
    limit = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(limit, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def bytes_at(tensor: CheckpointTensor) -> bytes:
    return tensor.file.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), data_offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    return str(caught.value)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """Return a folder whose one file holds "a", six float32."""
    save_file({"a": torch.arange(6.0)}, tmp_path / SINGLE_NAME)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return a folder of two files and an index; each file holds a "shared" that is another tensor."""
    save_file({"a": torch.ones(3), "shared": torch.ones(1)}, tmp_path / FIRST)
    save_file({"b": torch.ones(2, dtype=torch.bfloat16), "shared": torch.zeros(2)}, tmp_path / SECOND)
    write_index(tmp_path, {"a": FIRST, "b": SECOND, "shared": SECOND})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


# what is found


@st.composite
def contents(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=6), max_size=5, unique=True))
    shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
    dtypes = st.sampled_from(list(DTYPES.values()))
    return {
        name: tensor_of(draw(dtypes), draw(shapes), seed)
        for seed, name in enumerate(names)
        if name != "__metadata__"
    }


# The library writes metadata of no entries, beside no tensors, as what it cannot read back.
@given(
    contents(), st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1, max_size=2)
)
@settings(max_examples=60, deadline=None)
def test_tensors_lie_where_the_library_put_them(
    written: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file(written, Path(folder) / "any.safetensors", metadata)
        found = read_checkpoint(Path(folder))
        assert found.keys() == written.keys()
        for name, tensor in written.items():
            assert found[name].name == name
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tuple(tensor.shape))
            assert bytes_at(found[name]) == bytes_of(tensor)
            read = read_tensor(found[name])
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert bytes_of(read) == bytes_of(tensor)


def test_every_dtype_of_the_table_is_the_librarys(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        save_file({"a": tensor_of(dtype, (3,))}, tmp_path / SINGLE_NAME)
        header = (tmp_path / SINGLE_NAME).read_bytes()[8:].split(b"}}")[0]
        assert f'"dtype":"{name}"'.encode() in header


def test_a_file_is_known_by_its_status_and_header(single: Path) -> None:
    path = single / SINGLE_NAME
    status, content = path.stat(), path.read_bytes()
    found = read_checkpoint(path)["a"]
    assert found.file.path == path
    assert (found.file.size, found.file.device, found.file.inode, found.file.mtime_ns) == (
        len(content),
        status.st_dev,
        status.st_ino,
        status.st_mtime_ns,
    )
    assert found.file.header_sha256 == hashlib.sha256(content[: found.offset]).hexdigest()


def test_an_index_says_which_file_holds_a_tensor(sharded: Path) -> None:
    save_file({"stray": torch.ones(1)}, sharded / SINGLE_NAME)
    found = read_checkpoint(sharded)
    assert {name: tensor.file.path.name for name, tensor in found.items()} == {
        "a": FIRST,
        "b": SECOND,
        "shared": SECOND,
    }
    assert read_tensor(found["shared"]).tolist() == [0.0, 0.0]
    assert found["b"].file is found["shared"].file


def test_tensors_that_the_index_does_not_name_are_left_out(sharded: Path) -> None:
    write_index(sharded, {"b": SECOND})
    assert read_checkpoint(sharded).keys() == {"b"}


def test_one_file_is_the_model_among_others(single: Path) -> None:
    save_file({"other": torch.ones(1)}, single / "adapter.safetensors")
    assert read_checkpoint(single).keys() == {"a"}
    assert read_checkpoint(single / "adapter.safetensors").keys() == {"other"}


def test_files_may_be_links_to_a_common_store(sharded: Path) -> None:
    snapshot = sharded / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    (sharded / "blobs").mkdir()
    for number, name in enumerate((INDEX_NAME, FIRST, SECOND)):
        (sharded / name).rename(sharded / "blobs" / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    found = read_checkpoint(snapshot)
    assert found["a"].file.path == snapshot / FIRST
    assert read_tensor(found["a"]).tolist() == [1.0, 1.0, 1.0]


def test_a_relative_path_survives_a_change_of_folder(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single)
    found = read_checkpoint(Path(SINGLE_NAME))["a"]
    monkeypatch.chdir("/")
    assert read_tensor(found).tolist() == list(range(6))


def test_a_copy_is_made_in_host_memory_whatever_the_default_is(single: Path) -> None:
    found = read_checkpoint(single)["a"]
    with torch.device("meta"):
        assert read_tensor(found).tolist() == list(range(6))


def test_a_short_read_is_continued(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        checkpoint_file.os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:5]], offset)
    )
    assert read_tensor(read_checkpoint(single)["a"]).tolist() == list(range(6))


def test_no_descriptor_stays_open(single: Path) -> None:
    before = open_descriptors()
    found = read_checkpoint(single)["a"]
    read_tensor(found)
    raw_file(single / SINGLE_NAME, {"a": entry()})
    refusal(single)
    with pytest.raises(CorruptDataError):
        read_tensor(found)
    assert open_descriptors() == before


# damaged and hostile files

TWO = {"a": entry(), "b": entry(data_offsets=(8, 16))}
MAX_SIZE = 2**63 - 1

# header, data, what the message names
HOSTILE: dict[str, tuple[object, bytes, tuple[str, ...]]] = {
    "no JSON": (b"{]", b"", ("no JSON object in UTF-8",)),
    "not UTF-8": (b'{"\xff": 1}', b"", ("no JSON object in UTF-8", "0xff")),
    "UTF-16": ("{}".encode("utf-16"), b"", ("no JSON object in UTF-8",)),
    "nested": (b"[" * 200_000, b"", ("no JSON object in UTF-8", "recursion")),
    "a list": ([], b"", ("no JSON object in UTF-8: it is []",)),
    "long digits": (b'{"a": ' + b"1" * 5000 + b"}", b"", ("no JSON object in UTF-8",)),
    "one name twice": (b'{"a": {}, "a": {}}', b"", ("key 'a' is there twice",)),
    "one key twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", ("key 'dtype' is there twice",)),
    "no object": ({"a": [1]}, b"", ("tensor 'a' is described by [1]",)),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), ("tensor 'a' has dtype None",)),
    "packed dtype": ({"a": entry("F4", (4,), (0, 2))}, bytes(2), ("tensor 'a' has dtype 'F4'", "BF16")),
    "dtype a list": ({"a": entry(["F32"])}, bytes(8), ("tensor 'a' has dtype ['F32']",)),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8), ("tensor 'a' has shape None",)),
    "shape a number": ({"a": entry(shape=2)}, bytes(8), ("tensor 'a' has shape 2",)),
    "negative size": ({"a": entry(shape=(-1, -2))}, bytes(8), ("tensor 'a' has shape [-1, -2]",)),
    "bool for a size": ({"a": entry(shape=(True, 2))}, bytes(8), ("tensor 'a' has shape [True, 2]",)),
    "float for a size": ({"a": entry(shape=(2.0,))}, bytes(8), ("tensor 'a' has shape [2.0]",)),
    "huge size": ({"a": entry(shape=(2**63,))}, bytes(8), (f"to {MAX_SIZE}", "tensor 'a' has shape")),
    "overflow": ({"a": entry(shape=(2**32, 2**32))}, bytes(8), (f"beyond {MAX_SIZE} bytes", "tensor 'a'")),
    "overflow beside 0": ({"a": entry(shape=(0, 2**62, 4), data_offsets=(0, 0))}, b"", ("beyond", "'a'")),
    "many dimensions": ({"a": entry(shape=[1] * 65)}, bytes(4), ("not at most 64 sizes", "tensor 'a'")),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), ("tensor 'a' has data_offsets None",)),
    "one offset": ({"a": entry(data_offsets=(0,))}, bytes(8), ("tensor 'a' has data_offsets [0]",)),
    "text offset": ({"a": entry(data_offsets=(0, "8"))}, bytes(8), ("data_offsets [0, '8']", "tensor 'a'")),
    "bool offset": ({"a": entry(data_offsets=(False, 8))}, bytes(8), ("data_offsets [False, 8]",)),
    "negative offset": ({"a": entry(data_offsets=(-8, 0))}, bytes(8), ("data_offsets [-8, 0]", "tensor 'a'")),
    "huge offset": ({"a": entry(data_offsets=(0, 2**64))}, bytes(8), ("data_offsets", "tensor 'a'")),
    "end before begin": ({"a": entry(data_offsets=(8, 0))}, bytes(8), ("data_offsets [8, 0]", "tensor 'a'")),
    "beyond the file": ({"a": entry()}, bytes(7), ("tensor 'a' ends at byte", "the file at")),
    "far beyond": ({"a": entry("U8", (2**60,), (0, 2**60))}, bytes(8), ("tensor 'a' ends at byte 11529",)),
    "too few bytes": (
        {"a": entry(shape=(3,))},
        bytes(8),
        ("tensor 'a' has 8 bytes", "F32 of shape [3] has 12"),
    ),
    "too many bytes": ({"a": entry("BF16")}, bytes(8), ("tensor 'a' has 8 bytes", "BF16 of shape [2] has 4")),
    "overlap": (
        {"a": entry(), "b": entry(data_offsets=(4, 12))},
        bytes(12),
        ("tensor 'b'", "inside another"),
    ),
    "same place": ({"a": entry(), "b": entry()}, bytes(8), ("tensor 'b'", "inside another that ends at")),
    "a hole": ({"a": entry(), "b": entry(data_offsets=(9, 17))}, bytes(17), ("tensor 'b'", "belong to none")),
    "a hole at first": ({"a": entry(data_offsets=(1, 9))}, bytes(9), ("tensor 'a'", "belong to none")),
    "a hole at last": (TWO, bytes(17), ("the last tensor ends at byte", "the file at")),
    "metadata": ({"__metadata__": {"x": 1}}, b"", ("the safetensors library refuses it",)),
    "long metadata": ({"__metadata__": "x" * 5000}, b"", ("the safetensors library refuses it",)),
    "half a character": (
        b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        b"",
        ("the safetensors library refuses it",),
    ),
    "long name": ({"n" * 5000: entry("F4")}, bytes(8), ("tensor 'nnnn", "has dtype 'F4'")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    header, data, named = HOSTILE[case]
    path = raw_file(tmp_path / SINGLE_NAME, header, data)
    message = refusal(tmp_path)
    assert message.startswith(f"{path}: ")
    assert message.endswith(REMEDY)
    for words in named:
        assert words in message
    assert len(message) < len(str(path)) + 500


def test_the_two_tensors_of_the_table_are_valid_without_its_damage(tmp_path: Path) -> None:
    found = read_checkpoint(raw_file(tmp_path / "x.safetensors", TWO, bytes(range(16))))
    assert {name: bytes_at(tensor) for name, tensor in found.items()} == {
        "a": bytes(range(8)),
        "b": bytes(range(8, 16)),
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes"),
        (bytes(7), "has 7 bytes"),
        (struct.pack("<Q", 3) + b"{}", "the header ends at byte 11, the file at 10"),
        (struct.pack("<Q", MAX_HEADER_BYTES), f"the header ends at byte {MAX_HEADER_BYTES + 8}"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", f"{2**64 - 1} bytes, and {MAX_HEADER_BYTES} is the limit"),
    ],
)
def test_a_length_is_not_believed(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / SINGLE_NAME
    path.write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith(f"{path}: ")
    assert words in message


def test_a_header_over_the_limit_is_not_read_even_if_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_NAME
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    assert f"to have {MAX_HEADER_BYTES + 1} bytes, and {MAX_HEADER_BYTES} is the limit" in refusal(tmp_path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_changed_in_a_file_no_tensor_leaves_it(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = raw_file(Path(folder) / SINGLE_NAME, TWO, bytes(16))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        with contextlib.suppress(CheckpointError):
            for tensor in read_checkpoint(path).values():
                assert len(bytes_at(tensor)) == tensor.nbytes
                assert read_tensor(tensor).shape == tensor.shape


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / SINGLE_NAME)
    assert refusal(tmp_path).startswith(f"{tmp_path / SINGLE_NAME}: is no regular file")


# damaged and incomplete folders

INDEXES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "no JSON": (b"{", ("no JSON object in UTF-8",)),
    "not UTF-8": (b'"\xff"', ("no JSON object in UTF-8",)),
    "a list": (b"[]", ("no JSON object in UTF-8: it is []",)),
    "no map": (b"{}", ("no weight_map",)),
    "a map that is none": (b'{"weight_map": ["a"]}', ("no weight_map",)),
    "an empty map": (b'{"weight_map": {}}', ("no weight_map",)),
    "one name twice": (
        f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}'.encode(),
        ("key 'a' is there twice",),
    ),
}
FILE_NAMES: list[Any] = [
    1,
    None,
    "",
    ".",
    "..",
    "/etc/passwd",
    f"../{FIRST}",
    f"./{FIRST}",
    "\0",
    "\ud800",
    "x" * 256,
]


@pytest.mark.parametrize("case", INDEXES)
def test_a_damaged_index_is_refused(sharded: Path, case: str) -> None:
    content, named = INDEXES[case]
    (sharded / INDEX_NAME).write_bytes(content)
    message = refusal(sharded)
    assert message.startswith(f"{sharded / INDEX_NAME}: ")
    assert message.endswith(REMEDY)
    for words in named:
        assert words in message


@pytest.mark.parametrize("file_name", FILE_NAMES)
def test_an_index_leads_nowhere_else(sharded: Path, file_name: object) -> None:
    folder = sharded / "model"
    folder.mkdir()
    write_index(folder, {"a": file_name})
    message = refusal(folder)
    assert message.startswith(f"{folder / INDEX_NAME}: tensor 'a' is to be in ")
    assert "no plain file name" in message
    message.encode()  # it can be printed


def test_an_index_over_the_limit_is_not_read(sharded: Path) -> None:
    os.truncate(sharded / INDEX_NAME, MAX_HEADER_BYTES + 1)
    assert f"has {MAX_HEADER_BYTES + 1} bytes, and {MAX_HEADER_BYTES} is the limit" in refusal(sharded)


def test_a_file_that_the_index_names_is_missing(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    message = refusal(sharded)
    assert message.startswith(f"{sharded / INDEX_NAME}: tensor 'b' is to be in {SECOND}")
    assert "there is no such file" in message
    assert REMEDY in message


def test_a_link_whose_target_is_gone_is_a_missing_file(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    (sharded / SECOND).symlink_to("blobs/gone")
    assert f"tensor 'b' is to be in {SECOND}, and there is no such file" in refusal(sharded)


def test_an_index_whose_target_is_gone_does_not_count_as_none(single: Path) -> None:
    (single / INDEX_NAME).symlink_to("blobs/gone")
    with pytest.raises(StorageError) as caught:
        read_checkpoint(single)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(single / INDEX_NAME))


def test_a_tensor_that_the_index_names_is_missing(sharded: Path) -> None:
    write_index(sharded, {"a": SECOND})
    expected = f"{sharded / INDEX_NAME}: tensor 'a' is to be in {SECOND}, which does not hold it"
    assert refusal(sharded).startswith(expected)


def test_a_damaged_file_of_several_is_named(sharded: Path) -> None:
    size = (sharded / SECOND).stat().st_size
    os.truncate(sharded / SECOND, size - 1)
    message = refusal(sharded)
    assert message.startswith(f"{sharded / SECOND}: tensor ")
    assert f"ends at byte {size}, the file at {size - 1}" in message


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: no *.safetensors file")
    assert "convert it to safetensors" in message


def test_several_files_without_an_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    assert refusal(sharded).startswith(f"{sharded}: 2 *.safetensors files, but neither {INDEX_NAME} nor")


# what the system refuses


def test_refusals_of_the_system_name_the_path(single: Path) -> None:
    (single / "loop").symlink_to("loop")
    for path, number in (
        (single / "missing", errno.ENOENT),
        (single / SINGLE_NAME / "below", errno.ENOTDIR),
        (single / "loop", errno.ELOOP),
        (single / ("x" * 300), errno.ENAMETOOLONG),
    ):
        with pytest.raises(
            StorageError, match=r"cannot read the checkpoint: .*; give one that exists"
        ) as caught:
            read_checkpoint(path)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))


@pytest.fixture
def locked() -> Iterator[Path]:
    """Return a checkpoint's folder that lets nobody in, while the process is not the superuser."""
    user = os.geteuid()
    outer = Path(tempfile.mkdtemp(dir="/tmp"))
    folder = outer / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / SINGLE_NAME)
    outer.chmod(0o755)
    folder.chmod(0)
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
        shutil.rmtree(outer)


def test_a_folder_without_permission(locked: Path) -> None:
    for path in (locked, locked / SINGLE_NAME):
        with pytest.raises(StorageError, match="Permission denied") as caught:
            read_checkpoint(path)
        assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(path))


def test_a_device_that_fails_while_it_is_read(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    found = read_checkpoint(single)["a"]
    monkeypatch.setattr(checkpoint_file.os, "preadv", fail)
    for action in (lambda: read_checkpoint(single), lambda: read_tensor(found)):
        with pytest.raises(StorageError) as caught:
            action()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(single / SINGLE_NAME))


# a file that changes


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


def replace_alike(path: Path) -> None:
    status = path.stat()
    other = path.with_name("other")
    shutil.copyfile(path, other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "differs"), [(append, "size"), (cut, "size"), (touch, "mtime_ns"), (replace_alike, "inode")]
)
def test_a_changed_file_is_not_read(single: Path, change: Callable[[Path], None], differs: str) -> None:
    found = read_checkpoint(single)["a"]
    with found.file.path.open("rb") as file:
        check_unchanged(found.file, file.fileno())
    change(found.file.path)
    with pytest.raises(CorruptDataError, match=f"{differs} was [0-9]+, is [0-9]+") as caught:
        read_tensor(found)
    assert str(caught.value).startswith(f"{found.file.path}: ")
    with found.file.path.open("rb") as file, pytest.raises(CorruptDataError, match=differs):
        check_unchanged(found.file, file.fileno())


def test_only_what_differs_is_named(single: Path) -> None:
    file = read_checkpoint(single)["a"].file
    with file.path.open("rb") as handle, pytest.raises(CorruptDataError) as caught:
        check_unchanged(replace(file, device=file.device + 1), handle.fileno())
    assert f"(device was {file.device + 1}, is {file.device})" in str(caught.value)


def test_a_descriptor_that_is_closed(single: Path) -> None:
    file = read_checkpoint(single)["a"].file
    handle = os.open(file.path, os.O_RDONLY)
    os.close(handle)
    with pytest.raises(StorageError) as caught:
        check_unchanged(file, handle)
    assert caught.value.errno == errno.EBADF


def test_a_file_that_is_cut_while_it_is_read(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_checkpoint(single)["a"]
    monkeypatch.setattr(checkpoint_file.os, "preadv", lambda *_: 0)
    for action in (lambda: read_checkpoint(single), lambda: read_tensor(found)):
        with pytest.raises(CorruptDataError, match="it was cut meanwhile: fetch it again") as caught:
            action()
        assert str(single / SINGLE_NAME) in str(caught.value)


def test_a_file_that_is_exchanged_while_it_is_read_is_judged_as_it_was_opened(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, preadv = single / SINGLE_NAME, os.preadv

    def exchange(*arguments: Any) -> int:
        count = preadv(*arguments)
        path.unlink(missing_ok=True)
        return count

    monkeypatch.setattr(checkpoint_file.os, "preadv", exchange)
    assert read_checkpoint(single).keys() == {"a"}


def test_the_errors_are_the_packages_own() -> None:
    assert issubclass(CheckpointError, PeftdsError)
    assert issubclass(CheckpointError, ValueError)
    assert not issubclass(CheckpointError, OSError)


def test_another_header_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    file = read_checkpoint(path)["a"].file
    status = path.stat()
    with path.open("r+b") as opened:
        checkpoint_file.check_header(file, opened.fileno())
        opened.seek(path.read_bytes().index(b'"a"') + 1)
        opened.write(b"c")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with path.open("rb") as opened:
        checkpoint_file.check_unchanged(file, opened.fileno())
        with pytest.raises(CorruptDataError, match=r"model.safetensors: the header"):
            checkpoint_file.check_header(file, opened.fileno())
