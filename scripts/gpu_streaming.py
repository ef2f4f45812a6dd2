# SPDX-License-Identifier: Apache-2.0
"""Checks layers that are streamed to a GPU, without DeepSpeed; gpu_check.py runs this.

A LoRA model like a Llama is trained whole on the device, and streamed from its safetensors file through
page-locked host memory; losses and adapters must be the same bits for every budget of host and device
memory. Torch runs its repeatable kernels meanwhile, and fills new memory with NaNs, so that a use which has
not waited for its copy shows. Then: what the host never waits for, and what memory a stream takes.

Everything takes a ``Place``, so that all of it can be tried without a GPU (gpu_check.py --rehearse).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_checking import Check, all_right, guarded
from gpu_place import Place
from gpu_streaming_models import Model, Shape, Trainer, build, frozen, identical, write
from torch import Tensor

from peftds_ext.config import IoConfig
from peftds_ext.store.checkpoint import CheckpointTensor
from peftds_ext.store.engine import StorageEngine, choose_settings
from peftds_ext.stream.module import ModuleStream
from peftds_ext.stream.sources import sources_of
from peftds_ext.stream.uploads import Uploads

ALL = 1 << 40
"""A budget of more bytes than any model here has."""

Files = Mapping[str, CheckpointTensor]


@dataclass(frozen=True)
class Sizes:
    """How large the model is, and what it is trained on."""

    shape: Shape
    tokens: int
    locked_bytes: int
    """Of the page lock's own check."""
    shares: tuple[int, ...] = (0, 50, 100)
    """Budgets, in percent of what is streamed."""

    def budgets(self) -> dict[str, int]:
        """Return budgets in bytes, by their names."""
        base = self.shape.base_bytes
        return {f"{share} %": ALL if share == 100 else base * share // 100 for share in self.shares}


SMALL = Sizes(Shape(hidden=512, inner=1408, layers=5, vocabulary=2048, heads=8), 256, 16 << 20)
REHEARSED = Sizes(Shape(hidden=16, inner=32, layers=3, vocabulary=64, heads=2, rank=2), 8, 8192, (0, 100))


# ---- streams -----------------------------------------------------------------------------------


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Let torch choose kernels that give the same bits each time, and fill new memory with NaNs."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def streamed(
    place: Place, model: Model, files: Files, folder: Path, host: int, device: int = 0
) -> Iterator[tuple[ModuleStream, Uploads]]:
    """Stream what is frozen of a model, with budgets of host and device memory in bytes."""
    engine = StorageEngine(choose_settings(IoConfig(), folder), place.page_lock())
    try:
        sources = sources_of(files, model, engine)
        missing = frozen(model).keys() - sources.keys()
        if missing:
            raise RuntimeError(f"{len(missing)} frozen parameters have no source, such as {min(missing)}")
        copies = place.copies()
        with ModuleStream(model, sources, engine, host, device_budget=device, device=copies) as stream:
            if stream.uploads is None:
                raise RuntimeError("nothing is copied to the device")
            yield stream, stream.uploads
    finally:
        engine.close()


# ---- page-locked memory -----------------------------------------------------------------------


def page_locked(place: Place, size: int) -> Iterator[Check]:
    """The storage engine's memory is locked, all of it, and torch knows."""
    engine = StorageEngine(choose_settings(IoConfig(), Path()), place.page_lock())
    try:
        tensor = engine.empty(size, torch.uint8).copy_(torch.arange(size) % 251)
        usage, pinned = engine.arena.usage(), place.is_pinned(tensor)
        passed = pinned and usage.locked == usage.held == size
        detail = f"locked {usage.locked} of {usage.held}, is_pinned() is {pinned}. "
        yield Check("page lock", passed, "" if passed else detail + engine.arena.why_not_locked)
        there = tensor.to(place.device, non_blocking=True)
        place.wait()
        yield Check("page lock: what is copied from it arrives", torch.equal(there.cpu(), tensor))
    finally:
        engine.close()


# ---- the same bits ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is done with a model, in one stream after another."""

    name: str
    runs: tuple[Callable[[Trainer], object], ...]
    reentrant: bool | None = None


def _with_evaluations(trainer: Trainer) -> None:
    trainer.evaluate()
    trainer.steps(2)
    trainer.evaluate()
    trainer.evaluate()
    trainer.steps(2)


def _with_another_order(trainer: Trainer) -> None:
    trainer.steps(2)
    for route in ([0, 1, 2], [2, 1, 0], [0, 2], [1, 1, 2]):
        trainer.step(route)
    trainer.steps(2)


def _steps(trainer: Trainer) -> None:
    trainer.steps(3)


CASES = (
    Case("steps", (_steps,)),
    Case("evaluations between steps", (_with_evaluations,)),
    Case("an order that changes", (_with_another_order,)),
    Case("two streams in a row", (_steps, _with_evaluations)),
    Case("checkpointing", (_with_evaluations,), reentrant=False),
    Case("reentrant checkpointing", (_with_evaluations,), reentrant=True),
)


def resident(place: Place, sizes: Sizes, case: Case) -> list[Tensor]:
    """Return the results of a model that is whole on the device."""
    model = build(sizes.shape, place.device)
    model.reentrant = case.reentrant
    trainer = Trainer(model, sizes.shape, sizes.tokens)
    for run in case.runs:
        run(trainer)
    return trainer.results


def of_a_stream(
    place: Place, sizes: Sizes, files: Files, folder: Path, case: Case, host: int, device: int
) -> list[Tensor]:
    """Return the results of a model that is streamed."""
    model = build(sizes.shape, place.device)
    model.reentrant = case.reentrant
    trainer = Trainer(model, sizes.shape, sizes.tokens)
    for run in case.runs:
        with streamed(place, model, files, folder, host, device):
            run(trainer)
    place.wait()
    return trainer.results


def same_bits(place: Place, sizes: Sizes, files: Files, folder: Path, case: Case) -> Iterator[Check]:
    """Losses, and adapters after every step, for all budgets."""
    budgets = sizes.budgets()
    with repeatable():
        expected = resident(place, sizes, case)
        again = identical(resident(place, sizes, case), expected)
        finite = all(bool(result.isfinite().all()) for result in expected)
        wrong = [*([] if again else ["not without a stream"]), *([] if finite else ["NaNs without a stream"])]
        yield all_right(f"{case.name}: the resident model repeats its bits", wrong)
        wrong = []
        for host, device in itertools.product(budgets, budgets):
            got = of_a_stream(place, sizes, files, folder, case, budgets[host], budgets[device])
            if not identical(got, expected):
                first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not a.equal(b))
                wrong.append(f"host {host}, device {device}: result {first} of {len(got)} differs")
    yield all_right(f"{case.name}: the bits of the resident model, {len(budgets) ** 2} budgets", wrong)


# ---- nobody waits, and memory -----------------------------------------------------------------


def nobody_waits(place: Place, sizes: Sizes, files: Files, folder: Path) -> Iterator[Check]:
    """With all in host memory, copies are queued ahead, and nothing waits for the device."""
    model = build(sizes.shape, place.device)
    trainer = Trainer(model, sizes.shape, sizes.tokens, keep=False)
    with streamed(place, model, files, folder, ALL) as (_, uploads):
        trainer.steps(3)  # the first ones find out the order
        counts = uploads.counts
        before = (counts.ready, counts.demanded, counts.waits)
        passes = 3
        name = "no wait for the device in forward and backward"
        yield from guarded(name, lambda: _without_waits(place, trainer, name, passes))
        ready, demanded = counts.ready - before[0], counts.demanded - before[1]
        waits = counts.waits - before[2]
        yield Check("the host waits for no copy", waits == 0, f"{waits} waits")
        passed = ready > 0 and demanded <= passes
        yield Check("copies are queued ahead", passed, f"{ready} were, {demanded} not, in {passes} passes")


def _without_waits(place: Place, trainer: Trainer, name: str, passes: int) -> Iterator[Check]:
    with place.forbid_waits():
        for _ in range(passes):
            trainer.backward()
    yield Check(name, True)


def memory(place: Place, sizes: Sizes, files: Files, folder: Path) -> Iterator[Check]:
    """A stream takes two layers and its budget in the place of the base."""
    base = sum(parameter.nbytes for parameter in frozen(build(sizes.shape, place.device)).values())

    def peak(model: Model, kept: int) -> int:
        trainer = Trainer(model, sizes.shape, sizes.tokens, keep=False)
        trainer.steps(1)
        place.begin_peak()
        trainer.steps(3)
        return place.peak(kept)

    peak(build(sizes.shape, place.device), base)  # what libraries keep for good is there from now on
    whole = peak(build(sizes.shape, place.device), base)
    wrong, told = [], []
    for share in sizes.shares:
        budget = base * share // 100
        model = build(sizes.shape, place.device)
        with streamed(place, model, files, folder, ALL, budget) as (_, uploads):
            got = peak(model, 0)
            most = whole - base + 2 * max(uploads.sizes) + budget + place.rounding
        told.append(f"{got / 1e6:.1f} of {most / 1e6:.1f} MB with {share} %")
        if got > most:
            wrong.append(told[-1])
    yield Check("device memory", not wrong, f"{'; '.join(wrong or told)}; {whole / 1e6:.1f} MB resident")


# ---- the whole --------------------------------------------------------------------------------


def checks(place: Place, sizes: Sizes, folder: Path) -> Iterator[Check]:
    """Run every check; files are written to ``folder``."""
    yield from guarded("page lock", lambda: page_locked(place, sizes.locked_bytes))
    files: dict[str, CheckpointTensor] = {}

    def written() -> Iterator[Check]:
        model = build(sizes.shape, place.device)
        files.update(write(model, folder / "small.safetensors"))
        yield Check("the model's file", files.keys() == frozen(model).keys())

    yield from guarded("the model's file", written)
    if not files:
        return
    for case in CASES:
        run = lambda case=case: same_bits(place, sizes, files, folder, case)  # noqa: E731
        yield from guarded(case.name, run)
    yield from guarded("waits", lambda: nobody_waits(place, sizes, files, folder))
    yield from guarded("device memory", lambda: memory(place, sizes, files, folder))
