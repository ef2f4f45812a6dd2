# SPDX-License-Identifier: Apache-2.0
"""Plain torch modules streamed from files: what goes wrong, how a stream begins and ends."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from streamed_models import WIDTH, Stack, Trainer, identical, make_engine, on_disk, steps, trained
from torch import nn

from peftds_ext.errors import CorruptDataError, StorageError
from peftds_ext.store.checkpoint import read_checkpoint
from peftds_ext.store.engine import StorageEngine
from peftds_ext.stream.module import ModuleStream
from peftds_ext.stream.sources import sources_of

ALL = 1 << 30


# what goes wrong


def in_own_files(model: Stack, folder: Path, engine: StorageEngine) -> tuple[dict[str, Any], dict[str, str]]:
    """Write each block to a file of its own; returns the sources, and the file by name of block."""
    sources: dict[str, Any] = {}
    files = {}
    for name in [f"blocks.{number}" for number in range(len(model.blocks))]:
        files[name] = str(folder / f"{name}.safetensors")
        tensors = {n: p.detach() for n, p in model.named_parameters() if n.startswith(name)}
        save_file(tensors, files[name])
        sources |= sources_of(read_checkpoint(Path(files[name])), model, engine)
    return sources, files


@pytest.mark.parametrize("number", [2, 15, 22, 34, 46, 58])  # in the forward and the backward of two steps
def test_a_read_error_is_raised_where_the_layer_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("PEFTDS_IO_FAULTS", f"read:eio@{number}")
    engine, stack = make_engine(), Stack()
    sources, files = in_own_files(stack, tmp_path, engine)
    used: list[str] = []
    failures: list[tuple[str, StorageError]] = []
    with ModuleStream(stack, sources, engine, 0) as stream:
        of_layer = stream.use

        def use(layer: int, *, backward: bool) -> None:
            used.append(f"blocks.{layer}")
            of_layer(layer, backward=backward)

        monkeypatch.setattr(stream, "use", use)
        trainer = Trainer(stack)
        for _ in range(5):
            try:
                trainer.step()
            except StorageError as error:
                failures.append((used[-1], error))
                trainer.step()
        ((name, error),) = failures
        assert (error.errno, error.filename) == (errno.EIO, files[name])
        assert identical(trainer.results, trained(lambda t: [t.step() for _ in range(5)]).results)
    engine.close()


def threads() -> list[str]:
    """Return the threads of this process, without those of the kernel that serve it."""
    tasks = {task.name: (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
    return sorted(name for name, comm in tasks.items() if not comm.startswith("iou-"))


@pytest.mark.parametrize("where", ["in a layer", "while it waits"])
def test_nothing_is_left_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.delenv("PEFTDS_IO_FAULTS", raising=False)
    expected = trained(steps, dtype=torch.bfloat16).results  # also starts what torch starts once
    before = threads()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def interrupted(trainer: Trainer) -> None:
        trainer.step()
        if where == "in a layer":
            trainer.model.blocks[2].before = interrupt
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        trainer.step()

    stack, path = Stack(dtype=torch.bfloat16), tmp_path / "base.safetensors"
    start = {name: p.detach().clone() for name, p in stack.named_parameters() if p.requires_grad}
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        if where == "while it waits":
            monkeypatch.setenv("PEFTDS_IO_FAULTS", "read:delay=1000@55")
        engine = make_engine()
        sources = on_disk(stack, path, engine, torch.float32)
        with pytest.raises(KeyboardInterrupt), ModuleStream(stack, sources, engine, 8_000):
            interrupted(Trainer(stack))
        engine.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert threads() == before
    assert engine.arena.usage().live == 0

    monkeypatch.delenv("PEFTDS_IO_FAULTS", raising=False)
    stack.blocks[2].before = lambda block: None
    stack.load_state_dict(start, strict=False)
    engine = make_engine()
    sources = sources_of(read_checkpoint(path), stack, engine)
    with ModuleStream(stack, sources, engine, 8_000):
        trainer = Trainer(stack)
        steps(trainer)
        assert identical(trainer.results, expected)
    engine.close()
    assert threads() == before


# beginning and end


def test_after_the_stream_the_modules_are_as_they_were(engine: StorageEngine, tmp_path: Path) -> None:
    stack = Stack()
    before = {name: dict(vars(module)) for name, module in stack.named_modules()}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "forward")
    stream = ModuleStream(stack, on_disk(stack, tmp_path / "base.safetensors", engine), engine, ALL)
    Trainer(stack).step()
    assert stack.blocks[0].up.weight.numel() > 0  # it was to stay
    stream.close()
    stream.close()
    for name, module in stack.named_modules():
        assert not any(vars(module).get(hook) for hook in hooks)
        assert vars(module).keys() == before[name].keys()
    frozen = [p for p in stack.parameters() if not p.requires_grad]
    assert all(p.numel() == 0 for p in frozen)
    assert engine.arena.usage().live == 0


def test_a_graph_that_outlives_its_stream_says_so(engine: StorageEngine, tmp_path: Path) -> None:
    stack = Stack()
    with ModuleStream(stack, on_disk(stack, tmp_path / "base.safetensors", engine), engine, ALL):
        loss = stack(Trainer(stack).inputs()).sum()
    with pytest.raises(RuntimeError, match="the stream of this model is closed"):
        loss.backward()


def test_all_can_be_loaded_for_good(engine: StorageEngine, tmp_path: Path) -> None:
    stack, expected = Stack(dtype=torch.bfloat16), trained(steps, dtype=torch.bfloat16)
    stream = ModuleStream(
        stack, on_disk(stack, tmp_path / "base.safetensors", engine, torch.float32), engine, 0
    )
    trainer = Trainer(stack)
    steps(trainer)
    stream.load()
    stream.close()
    engine.close()
    ours, theirs = stack.state_dict(), expected.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    trainer.step()
    expected.step()
    assert identical(trainer.results, expected.results)


def test_what_cannot_be_streamed_is_named(engine: StorageEngine, tmp_path: Path) -> None:
    stack = Stack()
    sources = on_disk(stack, tmp_path / "base.safetensors", engine)
    source = sources["head.weight"]
    with pytest.raises(ValueError, match=r"^blocks.1.scale: is trainable"):
        ModuleStream(stack, {**sources, "blocks.1.scale": source}, engine, 0)
    with pytest.raises(ValueError, match=r"^head.wait: the model has no such parameter"):
        ModuleStream(stack, {**sources, "head.wait": source}, engine, 0)
    with pytest.raises(ValueError, match=r"^embed.weight: has 32 elements of torch.float32"):
        ModuleStream(stack, {**sources, "embed.weight": source}, engine, 0)
    with pytest.raises(ValueError, match=r"^head.weight: has 24 elements of torch.bfloat16"):
        ModuleStream(stack.bfloat16(), {"head.weight": source}, engine, 0)
    with pytest.raises(ValueError, match=r"^embed.weight: .* on meta"):
        ModuleStream(stack.float().to("meta"), sources, engine, 0)


def test_parameters_without_elements_are_left_alone(engine: StorageEngine, tmp_path: Path) -> None:
    stack = Stack()
    stack.nothing = nn.Parameter(torch.empty(0, 7), requires_grad=False)
    sources = on_disk(stack, tmp_path / "base.safetensors", engine)
    assert "nothing" not in sources
    head = sources["head.weight"]
    nothing = type(head)(head.file, 0, head.stored, head.dtype, 0, 0, read_only=True)
    with ModuleStream(stack, {**sources, "nothing": nothing}, engine, 0):
        Trainer(stack).step()
        assert stack.nothing.shape == (0, 7)


# sources


def test_sources_are_what_is_frozen_and_equal(engine: StorageEngine, tmp_path: Path) -> None:
    stack = Stack()
    stack.head.weight = nn.Parameter(torch.zeros(2, WIDTH), requires_grad=False)
    original = Stack()
    path = tmp_path / "base.safetensors"
    save_file({name: p.detach() for name, p in original.named_parameters() if name != "head.bias"}, path)
    opened: list[Path] = []
    open_file = engine.open_file
    engine.open_file = lambda path: [opened.append(path), open_file(path)][1]  # type: ignore[method-assign]
    checkpoint = read_checkpoint(path)
    names = sources_of(checkpoint, stack, engine).keys()
    frozen = {name for name, p in stack.named_parameters() if not p.requires_grad}
    assert names == frozen - {"head.weight", "head.bias"}
    assert opened == [path]
    path.write_bytes(path.read_bytes())
    with pytest.raises(CorruptDataError, match="changed while it was in use"):
        sources_of(checkpoint, stack, engine)


@pytest.mark.parametrize("name", ["one.weight", "other.weight"])
def test_a_tied_parameter_is_found_by_any_of_its_names(
    engine: StorageEngine, tmp_path: Path, name: str
) -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)}).requires_grad_(False)
    model["other"].weight = model["one"].weight
    save_file({name: torch.eye(2)}, tmp_path / "base.safetensors")
    sources = sources_of(read_checkpoint(tmp_path / "base.safetensors"), model, engine)
    assert sources.keys() == {"one.weight"}
