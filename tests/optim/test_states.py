# SPDX-License-Identifier: Apache-2.0
"""States in memory and in a file: the same bits whatever the chunks, in little memory, whole or lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peftds_ext import ops
from peftds_ext.config import IoConfig
from peftds_ext.errors import StateLostError, StorageError
from peftds_ext.optim import state_store
from peftds_ext.optim.state_format import StateFormat
from peftds_ext.optim.state_store import FileStore, MemoryStore
from peftds_ext.optim.states import MOMENTS, OptimizerStates
from peftds_ext.store.engine import StorageEngine, choose_settings
from peftds_ext.store.folder import StoreFolder

FORMATS = [StateFormat(m, n) for m in ("fp32", "split", "weight") for n in ("fp32", "bf16", "int8")]
SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


class Training:
    """Groups with weights, stepped by given gradients."""

    def __init__(self, store: Any, sizes: list[int], form: StateFormat) -> None:
        dtype = torch.float32 if form.master == "weight" else torch.bfloat16
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
        self.states = OptimizerStates(store)
        for weight in self.weights:
            kept = (lambda w=weight: w) if form.needs_weights else None
            self.states.add(weight.numel(), form, kept)
        for group, weight in enumerate(self.weights):
            self.states.initialize(group, weight.clone())

    def step(self, number: int) -> None:
        for group, weight in enumerate(self.weights):
            generator = torch.Generator().manual_seed(100 * number + group)
            grad = torch.randn(weight.numel(), generator=generator).bfloat16()
            self.states.step(group, grad, weight, SETTINGS)

    def everything(self) -> list[Tensor]:
        found = [self.states.read(i, name) for i in range(len(self.weights)) for name in ("master", *MOMENTS)]
        return found + self.weights


@pytest.fixture
def make_file_store(tmp_path: Path) -> Iterator[Callable[..., FileStore]]:
    stores = []

    def make() -> FileStore:
        engine = StorageEngine(choose_settings(IoConfig(), tmp_path))
        stores.append(FileStore(StoreFolder.create(tmp_path, rank=0), engine, rank=0, world_size=1))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def small_chunks(patch: pytest.MonkeyPatch, elements: int = 256) -> None:
    patch.setattr(state_store, "_CHUNK_STEP", elements)
    patch.setattr(state_store, "_CHUNK_BYTES", 1)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_chunks_do_not_show(
    make_file_store: Callable[..., FileStore], monkeypatch: pytest.MonkeyPatch, form: StateFormat
) -> None:
    small_chunks(monkeypatch)
    sizes = [1, 255, 256, 257, 3000]
    memory, disk = Training(MemoryStore(), sizes, form), Training(make_file_store(), sizes, form)
    for number in range(4):
        memory.step(number)
        disk.step(number)
    for ours, expected in zip(disk.everything(), memory.everything(), strict=True):
        assert torch.equal(ours, expected)
        assert torch.isfinite(ours).all()


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=4),
    form=st.sampled_from(FORMATS),
    chunk=st.sampled_from([256, 512, 1024]),
)
def test_any_groups(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], form: StateFormat, chunk: int
) -> None:
    root = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, chunk)
        engine = StorageEngine(choose_settings(IoConfig(), root))
        store = FileStore(StoreFolder.create(root, rank=0), engine, rank=0, world_size=1)
        try:
            memory, disk = Training(MemoryStore(), sizes, form), Training(store, sizes, form)
            for number in range(2):
                memory.step(number)
                disk.step(number)
            assert all(map(torch.equal, disk.everything(), memory.everything()))
        finally:
            store.close()
    assert not list(root.rglob("data.bin"))


def test_the_fp32_form_is_what_the_kernel_gives(make_file_store: Callable[..., FileStore]) -> None:
    disk = Training(make_file_store(), [1000], StateFormat("fp32", "fp32"))
    master, m, v = disk.weights[0].float(), torch.zeros(1000), torch.zeros(1000)
    out = torch.empty(1000, dtype=torch.bfloat16)
    for number in range(3):
        disk.step(number)
        grad = torch.randn(1000, generator=torch.Generator().manual_seed(100 * number)).bfloat16()
        ops.adamw_step_(master, grad, m, v, out, **SETTINGS, step=number + 1)
    for ours, expected in zip(disk.everything(), (master, m, v, out), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_memory_holds_a_few_chunks_only(
    make_file_store: Callable[..., FileStore], monkeypatch: pytest.MonkeyPatch, master: Any
) -> None:
    small_chunks(monkeypatch, 4096)
    store, form = make_file_store(), StateFormat(master, "fp32")
    disk = Training(store, [4096 * 40], form)
    disk.step(0)
    chunk = -(-form.nbytes(4096) // 4096) * 4096
    assert store._engine.arena.usage().peak_live <= 6 * chunk


def test_lent_and_taken_back_is_the_same(make_file_store: Callable[..., FileStore]) -> None:
    for form in FORMATS:
        disk = Training(make_file_store(), [5000], form)
        disk.step(0)
        before, codes = disk.everything(), disk.states.save_codes(0)
        disk.states.take_back(0, disk.states.lend(0))
        disk.states.load_codes(0, codes)  # an int8 block whose largest moment is negative has no such scale
        assert all(map(torch.equal, disk.everything(), before)), form


def test_a_part_that_is_taken_back_leaves_the_rest(make_file_store: Callable[..., FileStore]) -> None:
    disk = Training(make_file_store(), [700], StateFormat("split", "int8"))
    disk.step(0)
    master, m, v, _ = disk.everything()
    disk.states.take_back(0, {"master": master * 2})
    now = disk.everything()
    assert torch.equal(now[0], master * 2)
    assert torch.equal(now[1], m)
    assert torch.equal(now[2], v)
    assert torch.equal(now[3], (master * 2).bfloat16())


def test_a_part_is_read(make_file_store: Callable[..., FileStore], monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    disk = Training(make_file_store(), [1000], StateFormat("split", "int8"))
    disk.step(0)
    for name in ("master", *MOMENTS):
        whole = disk.states.read(0, name)
        for start, stop in itertools.combinations([0, 1, 255, 256, 300, 512, 999, 1000], 2):
            assert torch.equal(disk.states.read(0, name, start, stop), whole[start:stop])


def test_codes_of_another_form_are_refused(make_file_store: Callable[..., FileStore]) -> None:
    disk = Training(make_file_store(), [700], StateFormat("split", "int8"))
    codes = disk.states.save_codes(0)
    for wrong in ({**codes, "exp_avg": codes["exp_avg"][1:]}, {"exp_avg": codes["exp_avg"]}):
        with pytest.raises(ValueError, match="another size or format"):
            disk.states.load_codes(0, wrong)
    disk.step(0)


def test_groups_are_stepped_in_turn(make_file_store: Callable[..., FileStore]) -> None:
    disk = Training(make_file_store(), [300, 300], StateFormat("fp32", "fp32"))
    with pytest.raises(ValueError, match="it is the turn of group 0"):
        disk.states.step(1, disk.weights[1], None, SETTINGS)
    disk.step(0)
    assert disk.states.steps(0) == disk.states.steps(1) == 1


@pytest.mark.parametrize("store", ["memory", "file"])
def test_a_step_that_is_broken_off_loses_the_states(
    make_file_store: Callable[..., FileStore], store: str
) -> None:
    disk = Training(
        MemoryStore() if store == "memory" else make_file_store(), [300, 300], StateFormat("fp32", "fp32")
    )
    disk.states.checkpoint = "/checkpoints/step7"
    disk.states.step(0, disk.weights[0], None, SETTINGS)
    for attempt in (
        lambda: disk.step(0),
        disk.everything,
        lambda: disk.states.lend(1),
        lambda: disk.states.save_codes(0),
    ):
        with pytest.raises(StateLostError, match="resume from /checkpoints/step7"):
            attempt()


def test_the_file_is_gone_in_the_end(make_file_store: Callable[..., FileStore], tmp_path: Path) -> None:
    store = make_file_store()
    disk = Training(store, [300], StateFormat("fp32", "fp32"))
    assert disk.states.usage() == {"memory": 0, "disk": 4096}
    assert len(list(tmp_path.rglob("data.bin"))) == 1
    disk.states.close()
    disk.states.close()
    assert not list(tmp_path.rglob("data.bin"))


def test_no_record_is_told_to_be_verified(make_file_store: Callable[..., FileStore], tmp_path: Path) -> None:
    from peftds_ext.store.manifest import read_manifest

    store = make_file_store()
    disk = Training(store, [300], StateFormat("fp32", "fp32"))
    store.file._manifest._next = 0.0
    disk.step(0)
    (path,) = tmp_path.rglob("data.bin")
    (record,) = read_manifest(path.parent).records
    assert (record.key, record.nbytes, record.crc32c) == ("group0[0:300]", 4096, None)


def test_room_is_taken_at_once(
    make_file_store: Callable[..., FileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peftds_ext.store.swap_file import SwapFile

    def refuse(self: Any, key: str, dtype: torch.dtype, numel: int) -> None:
        raise StorageError("no room")

    states = OptimizerStates(make_file_store())
    states.add(300, StateFormat("fp32", "fp32"))
    assert states.usage()["disk"] == 4096
    monkeypatch.setattr(SwapFile, "reserve", refuse)
    with pytest.raises(StorageError, match="no room"):
        states.add(300, StateFormat("fp32", "fp32"))
    assert len(states) == 1
