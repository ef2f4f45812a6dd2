# SPDX-License-Identifier: Apache-2.0
"""A LoRA step with the base in memory, offloaded by stock, and offloaded by us to each tier and budget."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from baselines.fio import Fio
from engine_process import EngineProcess
from interleave import Comparison, Contender, Measure, NotMeasured, race
from replay import recorded_clock
from report import Report
from storage import BLOCK, Storage

pytestmark = pytest.mark.timeout(3600)

ANSWER_TIMEOUT_S = 900.0
WORKER = Path(__file__).with_name("stream_worker.py")
LOSS_TOLERANCE = 1e-3
"""Losses of two contenders after the same steps, relative; DeepSpeed's hooks change the order of sums."""

SHAPE = ("hidden", "layers", "vocabulary", "tokens", "checkpointing")
IN_PLACE = "ours_checkpoint"
RESIDENT = Measure("resident (ZeRO-2)", "resident", ("step",))
STOCK_HOST = Measure("stock, base in host memory", "stock_host", ("step",))
STOCK_DISK = Measure("stock, base on the disk, stage3_max_reuse_distance 0", "stock_disk", ("step",))
OURS_HOST = Measure("ours, base in host memory", "ours_host", ("step",))
OURS_DISK = {
    share: Measure(f"ours, base on the disk, {share} % of it may stay", f"ours_disk_{share}", ("step",))
    for share in (0, 25, 50, 100)
}
OURS_CHECKPOINT = {
    share: Measure(
        f"ours, in place from the checkpoint, {share} % of it may stay", f"{IN_PLACE}_{share}", ("step",)
    )
    for share in (0, 50)
}
READ = Measure("the base read once by fio", "fio", ("transfer",), 1)

MEASURES = (RESIDENT, STOCK_HOST, STOCK_DISK, OURS_HOST, *OURS_DISK.values(), *OURS_CHECKPOINT.values(), READ)
COMPARISONS = (
    Comparison("base in host memory, of the resident step", OURS_HOST, (RESIDENT,), target=1 / 1.05),
    Comparison("base in host memory, by stock", OURS_HOST, (STOCK_HOST,), target=None),
    Comparison("base on the disk, by stock", OURS_DISK[0], (STOCK_DISK,), target=2.0),
    Comparison("base on the disk, of the resident step", OURS_DISK[0], (RESIDENT,), target=None),
    Comparison("half of the base may stay, of the resident step", OURS_DISK[50], (RESIDENT,), target=1 / 1.1),
    Comparison("in place from the checkpoint, by stock", OURS_CHECKPOINT[0], (STOCK_DISK,), target=2.0),
    Comparison(
        "in place, half of it may stay, of the resident step",
        OURS_CHECKPOINT[50],
        (RESIDENT,),
        target=1 / 1.1,
    ),
)


def swapped_bytes(shape: dict[str, int]) -> int:
    """Return the bytes of the bf16 matrices that lie on the disk: those of a layer, embeddings and head."""
    hidden = shape["hidden"]
    layer = 4 * hidden * hidden + 3 * hidden * (hidden * 11 // 4)
    return 2 * (shape["layers"] * layer + 2 * shape["vocabulary"] * hidden)


def configs(shape: dict[str, int], folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the kind and the configuration of each worker; its name says whether it is in place."""

    def config(stage: int, device: str, name: str, **zero: Any) -> dict[str, Any]:
        place = {"device": device} | ({"nvme_path": str(folder / name)} if device == "nvme" else {})
        offload = {"offload_param": place} if stage == 3 else {}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}, **offload, **zero},
        }

    def ours(settings: dict[str, Any], **params: int | str) -> dict[str, Any]:
        settings["optimizer"]["params"].pop("torch_adam")
        return {**settings, "peftds_ext": {"enabled": True, "params": params}}

    base = swapped_bytes(shape)
    return {
        "resident": ("ours", ours(config(2, "none", "resident"))),
        "stock_host": ("stock", config(3, "cpu", "stock_host")),
        "stock_disk": ("stock", config(3, "nvme", "stock_disk", stage3_max_reuse_distance=0)),
        "ours_host": ("ours", ours(config(3, "cpu", "ours_host"))),
        **{
            f"ours_disk_{share}": (
                "ours",
                ours(config(3, "nvme", f"ours_disk_{share}"), host_bytes=base * share // 100),
            )
            for share in OURS_DISK
        },
        **{
            f"{IN_PLACE}_{share}": (
                "ours",
                ours(
                    config(3, "nvme", f"{IN_PLACE}_{share}"),
                    source="checkpoint",
                    host_bytes=base * share // 100,
                ),
            )
            for share in OURS_CHECKPOINT
        },
    }


def _same_work(workers: dict[str, EngineProcess]) -> Iterator[str]:
    """Compare everybody's losses with the resident ones; yield the notes."""
    resident = workers["resident"].ask("losses")
    for name, worker in workers.items():
        losses = worker.ask("losses")
        off = max(abs(a - b) / abs(b) for a, b in zip(losses, resident, strict=True))
        if off > LOSS_TOLERANCE:
            raise AssertionError(f"{name} does other work: losses {off:.1e} from the resident ones")
        if name != "resident":
            equal = "bit-equal to" if losses == resident else f"within {off:.1e} of"
            yield f"same work: {len(losses)} losses of {name} are {equal} the resident ones"


def _limit(report: Report) -> Iterator[str]:
    """Tell how near steps from the disk come to what compute and disk allow."""
    for measure in (OURS_DISK[0], OURS_CHECKPOINT[0]):
        try:
            resident, ours, read = (report.median(m) for m in (RESIDENT, measure, READ))
        except NotMeasured as reason:
            yield f"limit: not measured: {reason}"
            return
        limit = max(resident, 2 * read)
        yield (
            f"limit of a step, the slower of the resident step and of reading the base twice with fio: "
            f"{limit * 1e3:.1f} ms; {measure.label}: {ours / limit:.2f} of it (target 1.25)"
        )


def write_checkpoint(shape: dict[str, int], folder: Path) -> Path:
    """Write the base in a process of its own, so that the memory goes back."""
    code = (
        "import json, sys; from stream_worker import Shape, build_base; "
        "build_base(Shape(**json.loads(sys.argv[1]))).save_pretrained(sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", code, json.dumps(shape), str(folder)], check=True, cwd=WORKER.parent
    )
    return folder


def _workers(
    shape: dict[str, int], folder: Path, stack: ExitStack, not_measured: dict[str, str]
) -> dict[str, EngineProcess]:
    checkpoint = write_checkpoint(shape, folder / "checkpoint")
    workers = {}
    for name, (kind, settings) in configs(shape, folder).items():
        arguments = ["--kind", kind, "--shape", json.dumps(shape), "--config", json.dumps(settings)]
        arguments += ["--checkpoint", str(checkpoint)] if name.startswith(IN_PLACE) else []
        try:
            worker = EngineProcess(name, arguments, folder, timeout_s=ANSWER_TIMEOUT_S, worker=WORKER)
        except NotMeasured as reason:
            not_measured[name] = str(reason)
        else:
            workers[name] = stack.enter_context(worker)
    return workers


def _fio(base: int, folder: Path, not_measured: dict[str, str]) -> list[Contender]:
    size = -(-base // BLOCK) * BLOCK
    try:
        reader = Fio(Storage(folder, size, any_folder=False), "fio io_uring")
    except NotMeasured as reason:
        not_measured["fio"] = str(reason)
        return []
    return [Contender("fio", lambda: reader.transfer("read", size))]


@pytest.fixture(scope="module")
def report(
    pytestconfig: pytest.Config,
    publish: Callable[[Report], Report],
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    shape = {name: pytestconfig.getoption(name) for name in SHAPE}
    rounds, warmup_rounds = pytestconfig.getoption("rounds"), pytestconfig.getoption("warmup_rounds")
    folder = tmp_path_factory.mktemp("stream")
    not_measured: dict[str, str] = {}
    with ExitStack() as stack:
        workers = _workers(shape, folder, stack, not_measured)
        contenders = [Contender(name, worker.run) for name, worker in workers.items()]
        contenders += _fio(swapped_bytes(shape), folder, not_measured)
        samples = race(contenders, rounds=rounds, warmup_rounds=warmup_rounds)
        samples.not_measured = not_measured
        notes = list(_same_work(workers))
        for name in ("ours_disk_0", f"{IN_PLACE}_0"):
            notes.append(f"{name}: " + workers[name].ask("stats").replace("\n", "; "))
    report = Report(
        f"LoRA step, {shape['layers']} layers of {shape['hidden']}, {shape['tokens']} tokens",
        swapped_bytes(shape),
        rounds,
        samples,
        MEASURES,
        COMPARISONS,
        () if "fio" in not_measured else (READ,),
        notes,
    )
    report.notes += _limit(report)
    return publish(report)


@pytest.mark.benchmark(timer=recorded_clock)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.label)
def test_row(measure: Measure, report: Report, record: Callable[[Report, Measure], None]) -> None:
    record(report, measure)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.label)
def test_target(comparison: Comparison, report: Report, hold: Callable[[Report, Comparison], None]) -> None:
    hold(report, comparison)
