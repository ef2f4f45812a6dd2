# SPDX-License-Identifier: Apache-2.0
"""Times layers that are streamed to a GPU, beside what they are held to; gpu_check.py runs this.

Medians of rounds in which both sides take turns. What is judged: copies of a sweep against one large copy,
and the streamed step against the resident one where copying takes less time than computing. Everything else
goes into the report.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_checking import Check, guarded
from gpu_place import Place, seconds
from gpu_streaming import ALL, Files, repeatable, streamed
from gpu_streaming_models import Model, Shape, Trainer, build, frozen, identical, write

from peftds_ext.config import IoConfig
from peftds_ext.observe.stats import union_length
from peftds_ext.store.engine import StorageEngine, choose_settings
from peftds_ext.store.media import locate
from peftds_ext.stream.uploads import Uploads

ROUNDS, WARM_UP = 7, 3
SWEEP_TARGET, STEP_TARGET, OVERLAP_TARGET = 0.95, 1.03, 0.9
ABOVE = 0.9
"""Copies take at most this share of the resident step where the step must not be longer for them."""

GIB = 1 << 30
Report = dict[str, Any]


@dataclass(frozen=True)
class Large:
    """What is timed."""

    shape: Shape
    counts: tuple[int, ...]
    """Tokens of a step."""
    copied_at_once: int
    """Bytes of the copy that sweeps are compared with."""
    disk_step_s: float = 1.0
    """About how long a step from the disk may take."""


REHEARSED = Large(Shape(hidden=16, inner=32, layers=3, vocabulary=64, heads=2, rank=2), (4, 8), 1 << 16)


def fitting(device: int, host: int, disk: int) -> Large:
    """Choose sizes for so many free bytes of the device's and the host's memory, and of the disk."""
    counts = (128, 512, 2048, 8192, 32768)
    for hidden, inner, heads in ((4096, 11008, 32), (2048, 5632, 16), (1024, 2816, 8)):
        shape = Shape(hidden, inner, layers=8, vocabulary=4096, heads=heads)
        if 5 * shape.base_bytes <= device and 3 * shape.base_bytes <= host and 2 * shape.base_bytes <= disk:
            break
    else:
        shape = Shape(1024, 2816, layers=4, vocabulary=4096, heads=8)
    per_token = 2 * shape.layers * (14 * shape.hidden + 5 * shape.inner) + 16 * shape.vocabulary
    room = max(0, device - 3 * shape.base_bytes) // 2
    kept = [count for count in counts if count * per_token <= room]
    return Large(shape, tuple(kept or counts[:1]), GIB)


def medians(place: Place, actions: Sequence[Callable[[], object]]) -> list[float]:
    """Time actions in turns, another one first each time; return the median seconds of each."""
    times: list[list[float]] = [[] for _ in actions]
    warm_up, rounds = (WARM_UP, ROUNDS) if place.judged else (1, 2)
    for number in range(warm_up + rounds):
        for index in range(len(actions)):
            which = (number + index) % len(actions)
            took = seconds(place, actions[which])
            if number >= warm_up:
                times[which].append(took)
    return [statistics.median(taken) for taken in times]


# ---- copies -----------------------------------------------------------------------------------


def sweep(place: Place, large: Large, trainer: Trainer, uploads: Uploads, report: Report) -> Iterator[Check]:
    """Forward passes that compute next to nothing go as fast as one large copy."""
    pinned = place.pinned(large.copied_at_once)
    there = torch.empty(large.copied_at_once, dtype=torch.uint8, device=place.device)
    for _ in range(WARM_UP):
        trainer.evaluate()
    before = uploads.counts.bytes
    trainer.evaluate()
    swept = uploads.counts.bytes - before
    copy_s, sweep_s = medians(place, [lambda: there.copy_(pinned, non_blocking=True), trainer.evaluate])
    copy_rate, sweep_rate = large.copied_at_once / copy_s, swept / sweep_s
    report["pinned_copy_gb_per_s"], report["sweep_gb_per_s"] = copy_rate / 1e9, sweep_rate / 1e9
    passed = not place.judged or sweep_rate >= SWEEP_TARGET * copy_rate
    detail = f"{sweep_rate / 1e9:.2f} GB/s, {sweep_rate / copy_rate:.3f} of one large copy's"
    yield Check(f"copies of a sweep, at least {SWEEP_TARGET} of the rate of one large copy", passed, detail)


def overlap(trainer: Trainer, place: Place, uploads: Uploads) -> float:
    """Return the share of a step's copies, in time, during which the device did not wait for a layer."""
    place.wait()
    uploads.drain()
    trainer.step()
    place.wait()
    events = uploads.drain()
    copies = [(event.start, event.end) for event in events if event.kind == "copy"]
    stalls = [(event.start, event.end) for event in events if event.kind == "stall"]
    both = union_length(copies) + union_length(stalls) - union_length([*copies, *stalls])
    return 1 - both / max(1, union_length(copies))


# ---- steps ------------------------------------------------------------------------------------


def steps(
    place: Place, large: Large, whole: Model, model: Model, uploads: Uploads, report: Report
) -> Iterator[Check]:
    """A step with the base in host memory is as long as a resident one, where copies can hide behind it."""
    rows: list[dict[str, Any]] = []
    report["steps"] = rows
    rate = report["pinned_copy_gb_per_s"] * 1e9
    for tokens in large.counts:
        resident, ours = (Trainer(each, large.shape, tokens, keep=False) for each in (whole, model))
        ours.steps(WARM_UP)
        before, waits = uploads.counts.bytes, uploads.counts.waits
        ours.step()
        copied = uploads.counts.bytes - before
        resident_s, ours_s = medians(place, [resident.step, ours.step])
        row = {"tokens": tokens, "resident_s": resident_s, "streamed_s": ours_s, "ratio": ours_s / resident_s}
        row |= {"copy_s": copied / rate, "hidden": copied / rate <= ABOVE * resident_s}
        row |= {"of_the_limit": ours_s / max(resident_s, copied / rate)}
        row |= {"overlap": overlap(ours, place, uploads), "waits": uploads.counts.waits - waits}
        rows.append(row)
        yield from _judge(place, row)
    holds = [row["ratio"] <= STEP_TARGET for row in rows]
    first = next((row["tokens"] for at, row in enumerate(rows) if all(holds[at:])), None)
    report["first_tokens_that_hold"] = first
    told = f"from {first} tokens on" if first is not None else f"at none of {list(large.counts)}"
    yield Check(f"streamed step / resident step <= {STEP_TARGET}: {told}", True)


def _judge(place: Place, row: dict[str, Any]) -> Iterator[Check]:
    name = f"step of {row['tokens']} tokens, base in host memory"
    judged = place.judged and row["hidden"]
    passed = not judged or (row["ratio"] <= STEP_TARGET and row["overlap"] >= OVERLAP_TARGET)
    yield Check(
        name,
        passed and not row["waits"],
        f"{row['streamed_s'] * 1e3:.2f} ms, {row['ratio']:.3f} of the resident step, "
        f"{row['of_the_limit']:.3f} of what computing or copying takes; "
        f"{row['overlap']:.1%} of the copies' time under computing, {row['waits']} waits of the host"
        + ("" if judged else "; not judged"),
    )


def large_bits(place: Place, large: Large, whole: Model, model: Model) -> Iterator[Check]:
    """Large layers, whose copies take long, give the resident model's bits as well."""
    results = []
    tokens = large.counts[0]
    with repeatable():
        for each in (whole, model):
            trainer = Trainer(each, large.shape, tokens)
            trainer.steps(2)
            trainer.evaluate()
            place.wait()
            results.append(trainer.results)
    yield Check("large layers: the bits of the resident model", identical(*results))


# ---- from the disk ----------------------------------------------------------------------------


def read_seconds(place: Place, files: Files, names: Sequence[str], folder: Path) -> tuple[int, float]:
    """Return bytes and seconds of reading tensors at once, without anything else."""
    engine = StorageEngine(choose_settings(IoConfig(), folder), place.page_lock())
    try:
        file = engine.open_file(next(iter(files.values())).file.path)
        pieces = [
            (files[name].offset, engine.empty(files[name].nbytes, torch.uint8).fill_(0)) for name in names
        ]
        took = statistics.median(seconds(place, lambda: engine.read(file, pieces).wait()) for _ in range(3))
        return sum(tensor.nbytes for _, tensor in pieces), took
    finally:
        engine.close()


def from_disk(place: Place, large: Large, files: Files, folder: Path, report: Report) -> Iterator[Check]:
    """A step with nothing kept in host memory; told, and not judged, since a disk's rate is its own."""
    layer = [name for name in files if name.startswith("blocks.0.")]
    size, took = read_seconds(place, files, layer, folder)
    if 4 * took > 3 * large.disk_step_s:
        yield Check("step from the disk", True, f"not timed: the disk reads {size / took / 1e9:.2f} GB/s")
        return
    fast_enough = int(large.disk_step_s / (2 * took))
    shape = Shape(**{**vars(large.shape), "layers": max(2, min(large.shape.layers, fast_enough))})
    tokens = large.counts[min(2, len(large.counts) - 1)]
    whole, model = build(shape, place.device), build(shape, place.device)
    resident, ours = (Trainer(each, shape, tokens, keep=False) for each in (whole, model))
    files = {name: files[name] for name in frozen(model)}
    for share in (0, 50):
        host = shape.base_bytes * share // 100
        with streamed(place, model, files, folder, host) as (stream, _):
            ours.steps(3)
            before = stream.pipeline.executor.counts().bytes
            ours.step()
            read = stream.pipeline.executor.counts().bytes - before
            resident_s, ours_s = medians(place, [resident.step, ours.step])
        limit = max(resident_s, read * took / size)
        report[f"from_disk_{share}"] = {
            "tokens": tokens,
            "layers": shape.layers,
            "resident_s": resident_s,
            "streamed_s": ours_s,
            "read_bytes": read,
            "disk_gb_per_s": size / took / 1e9,
            "of_the_limit": ours_s / limit,
        }
        yield Check(
            f"step of {tokens} tokens from the disk, {share} % of the base may stay",
            True,
            f"{ours_s * 1e3:.1f} ms, resident {resident_s * 1e3:.1f} ms; {ours_s / limit:.3f} of what "
            f"computing, or reading {read / 1e6:.0f} MB at {size / took / 1e9:.2f} GB/s, takes; not judged",
        )


# ---- the whole --------------------------------------------------------------------------------


def rates(place: Place, large: Large, folder: Path, report: Report) -> Iterator[Check]:
    """Time everything; results go into ``report`` as they come."""
    report |= {"shape": vars(large.shape), "files_on": str(locate(folder))}

    def with_host_memory() -> Iterator[Check]:
        whole, model = build(large.shape, place.device), build(large.shape, place.device)
        files.append(write(whole, folder / "large.safetensors"))
        with streamed(place, model, files[0], folder, ALL) as (_, uploads):
            yield from guarded("large layers", lambda: large_bits(place, large, whole, model))
            trainer = Trainer(model, large.shape, min(8, large.counts[0]))
            yield from guarded("sweep", lambda: sweep(place, large, trainer, uploads, report))
            yield from guarded("steps", lambda: steps(place, large, whole, model, uploads, report))

    files: list[Files] = []
    yield from guarded("base in host memory", with_host_memory)
    if files:
        yield from guarded("from the disk", lambda: from_disk(place, large, files[0], folder, report))
