# SPDX-License-Identifier: Apache-2.0
"""The Adam step of ZeRO-3 engines, one rank: states in memory and on NVMe, and each form of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from agreement import check_agreement, check_equal
from baselines.fio import FioBothWays
from bench_engine_step import ANSWER_TIMEOUT_S, BEST_SETTINGS, TOLERANCE, config
from engine_process import EngineProcess
from engine_worker import Model
from interleave import Comparison, Contender, Measure, NotMeasured, Samples, race
from optimizer_report import FIO, OptimizerReport, bytes_of, check_ended, derive, limit_of
from replay import recorded_clock
from storage import BLOCK, DEPTH, Storage, file_system
from torch import Tensor

pytestmark = pytest.mark.timeout(3600)

PARTS = 12
"""Parameters that share the elements. Stock steps whole ones, and could not overlap anything with one."""

LEAST_FIO_BYTES = 64 * BLOCK
"""Fewer each way would take little more time than fio's clock shows."""

COMPACT_TOLERANCE = 0.2
"""bf16 weights after steps with compact states, relative to the way gone: the worst that is believed."""

FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "fp32": ("fp32", {}),
    "split": ("fp32, split master", {"master": "split"}),
    "bf16": ("bf16, split master", {"states": "bf16", "master": "split"}),
    "int8": ("int8, split master", {"states": "int8", "master": "split"}),
}
"""Label of each form of ours, and its keys in our section's ``optimizer``."""

# Tried for stock on a two-core machine, alternating, 20 million elements, states on an ext4 disk: blocks
# larger than a gradient of one parameter keep gradients in memory, which saves a quarter of all bytes. The
# larger a sub-group, the faster, but what is in buffers is not on the disk: both settings may have 8 B per
# element of them. Pipelined needs 12 buffers, for sub-groups that are read, stepped and written at once. Two
# threads per transfer are the fastest; four, a depth of 32, single_submit, or no overlap_events are not.
STOCK_PARTS, STOCK_BUFFERS = {False: 6, True: 2}, {False: 4, True: 12}
STOCK_AIO = {"intra_op_parallelism": 2}

Worker = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Tier:
    """Contenders that race together: ``rows`` has their labels, and ``workers`` makes their settings.

    ``workers`` is called with the number of elements and a folder for states, ``on_disk`` if they are there.
    """

    title: str
    rows: dict[str, str]
    workers: Callable[[int, Path], dict[str, Worker]]
    measures: tuple[Measure, ...]
    comparisons: tuple[Comparison, ...]
    on_disk: bool


def ours(settings: dict[str, Any], form: str) -> Worker:
    """Return the worker with our section: fio's blocks, and steps that are over when they return."""
    section = {
        "enabled": True,
        "optimizer": {**FORMS[form][1], "overlap": False},
        "io": {"block_bytes": BLOCK, "queue_depth": DEPTH},
    }
    return "ours", {**settings, "peftds_ext": section}


def on_cpu(elements: int, folder: Path) -> dict[str, Worker]:
    """Return the workers whose states are in memory."""
    best = config(elements, BEST_SETTINGS)
    workers: dict[str, Worker] = {"stock_cpu": ("stock", best)}
    workers |= {f"ours_cpu_{form}": ours(best, form) for form in FORMS}
    return workers | {"torch": ("torch", {}), "plain": ("plain", {})}


def nvme_config(elements: int, folder: Path, **settings: Any) -> dict[str, Any]:
    """Return a configuration that keeps the states in ``folder``, which is made."""
    folder.mkdir()
    offload = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False, **settings}
    return config(elements, {**BEST_SETTINGS, "offload_optimizer": offload})


def stock_on_nvme(elements: int, folder: Path, *, pipelined: bool) -> Worker:
    """Return stock at its best settings."""
    settings = nvme_config(
        elements,
        folder,
        pipeline_read=pipelined,
        pipeline_write=pipelined,
        buffer_count=STOCK_BUFFERS[pipelined],
    )
    part = -(-elements // PARTS)
    settings["zero_optimization"]["sub_group_size"] = max(1, elements // PARTS * STOCK_PARTS[pipelined])
    settings["aio"] = {**STOCK_AIO, "block_size": (4 * part // 4096 + 1) * 4096}
    return "stock", settings


def on_nvme(elements: int, folder: Path) -> dict[str, Worker]:
    """Return the workers whose states are on the disk that ``folder`` is on."""
    workers = {
        "stock_nvme": stock_on_nvme(elements, folder / "stock_nvme", pipelined=False),
        "stock_nvme_pipelined": stock_on_nvme(elements, folder / "stock_nvme_pipelined", pipelined=True),
    }
    for form in FORMS:
        name = f"ours_nvme_{form}"
        workers[name] = ours(nvme_config(elements, folder / name), form)
    return workers


STEP, SUM = ("step",), ("backward", "step")


def _measures(rows: dict[str, str]) -> Iterator[Measure]:
    for name, label in rows.items():
        if name == "plain":
            yield Measure(f"{label}: backward", name, ("backward",))
        else:
            yield Measure(f"{label}: step", name, STEP)
        if name not in ("plain", "torch"):
            yield Measure(f"{label}: backward + step", name, SUM)


def _labels(tier: str, place: str) -> dict[str, str]:
    return {f"ours_{tier}_{form}": f"ours, {place}, {label}" for form, (label, _) in FORMS.items()}


CPU_ROWS = {
    "stock_cpu": "stock, memory",
    **_labels("cpu", "memory"),
    "torch": "torch AdamW(fused=True), fp32",
    "plain": "the model's own (no DeepSpeed)",
}
NVME_ROWS = {
    "stock_nvme": "stock, NVMe",
    "stock_nvme_pipelined": "stock, NVMe, pipelined",
    **_labels("nvme", "NVMe"),
}


def _cpu_comparisons() -> Iterator[Comparison]:
    stock = Measure("stock, memory: backward + step", "stock_cpu", SUM)
    for form, target in {"fp32": None, "split": 1.9, "bf16": 2.5, "int8": 3.0}.items():
        name, label = f"ours_cpu_{form}", f"memory, {FORMS[form][0]}: backward + step"
        yield Comparison(label, Measure(label, name, SUM), (stock,), target)
    alone = Measure(CPU_ROWS["ours_cpu_fp32"], "ours_cpu_fp32", STEP)
    yield Comparison("memory, fp32: step", alone, (Measure(CPU_ROWS["torch"], "torch", STEP),), target=None)


def _nvme_comparisons() -> Iterator[Comparison]:
    def stock(phases: tuple[str, ...]) -> tuple[Measure, ...]:
        names = ("stock_nvme", "stock_nvme_pipelined")
        return tuple(Measure(NVME_ROWS[name], name, phases) for name in names)

    for form, target in {"fp32": 2.0, "split": None, "bf16": None, "int8": 4.0}.items():
        name, label = f"ours_nvme_{form}", f"NVMe, {FORMS[form][0]}"
        step, limit = Measure(label, name, STEP), Measure("the disk's limit", limit_of(name), STEP)
        yield Comparison(f"{label}: step", step, stock(STEP), target)
        yield Comparison(f"{label}: backward + step", Measure(label, name, SUM), stock(SUM), target=None)
        at_limit = 1 / 1.15 if form == "fp32" else None
        yield Comparison(f"{label}: step, of the limit", step, (limit,), at_limit)
    exact, compact = (
        Measure(NVME_ROWS[name], bytes_of(name), STEP) for name in ("ours_nvme_fp32", "ours_nvme_int8")
    )
    label, quantity = f"NVMe, {FORMS['int8'][0]}: bytes", "the elements per byte"
    yield Comparison(label, compact, (exact,), target=1 / 0.36, quantity=quantity)


TIERS = {
    "cpu": Tier(
        "Adam step, states in memory",
        CPU_ROWS,
        on_cpu,
        tuple(_measures(CPU_ROWS)),
        tuple(_cpu_comparisons()),
        on_disk=False,
    ),
    "nvme": Tier(
        "Adam step, states on NVMe",
        NVME_ROWS,
        on_nvme,
        tuple(_measures(NVME_ROWS)),
        tuple(_nvme_comparisons()),
        on_disk=True,
    ),
}


def _start(
    tier: Tier, elements: int, logs: Path, folder: Path, stack: ExitStack, not_measured: dict[str, str]
) -> dict[str, EngineProcess]:
    """Start the workers that can run here; the reasons of the others go to ``not_measured``."""
    workers = {}
    for name, (kind, settings) in tier.workers(elements, folder).items():
        arguments = ["--kind", kind, "--elements", str(elements), "--parts", str(PARTS), "--count-bytes"]
        try:
            worker = EngineProcess(
                name, [*arguments, "--config", json.dumps(settings)], logs, timeout_s=ANSWER_TIMEOUT_S
            )
        except NotMeasured as reason:
            not_measured[name] = str(reason)
        else:
            workers[name] = stack.enter_context(worker)
    return workers


def _fio_bytes(elements: int) -> int:
    """Return what fio moves each way: as many bytes as the exact states have, in whole blocks."""
    return max(LEAST_FIO_BYTES, -(-12 * elements // BLOCK) * BLOCK)


def _fio(elements: int, folder: Path, not_measured: dict[str, str]) -> list[Contender]:
    """Return what measures the disk both ways at once; why it cannot goes to ``not_measured``."""
    try:
        both_ways = FioBothWays(Storage(folder, _fio_bytes(elements), any_folder=False), FIO)
    except NotMeasured as reason:
        not_measured[FIO] = str(reason)
        return []
    return [Contender(FIO, both_ways.transfer)]


def _limits(samples: Samples, tier: Tier, elements: int) -> Iterator[str]:
    """Add the limits and the bytes of all contenders that use the disk; yield what the disk can do."""
    size = 2 * _fio_bytes(elements)
    for name in tier.rows:
        derive(samples, name, size)
    try:
        rate = size / samples.median(FIO, ("transfer",)) / 1e9
    except NotMeasured as reason:
        yield f"limit: not measured: {reason}"
    else:
        yield (
            f"limit: {rate:.2f} GB/s by fio, which reads one file while it writes as much of another: "
            f"io_uring, direct, blocks of {BLOCK:,} bytes, {DEPTH} in flight each way"
        )


def _same_work(tier: Tier, weights: dict[str, Tensor], start: Tensor, steps: int) -> Iterator[str]:
    """Compare bf16 weights with those of a stock engine, and fp32 ones on the disk with those in memory."""
    reference = next((name for name in weights if name.startswith("stock")), None)
    for name in tier.rows:
        if name not in weights or name in (reference, "plain", "torch"):
            continue
        if reference is None:
            yield f"same work: {name} is not checked, since there is no stock engine to compare with"
            continue
        tolerance = COMPACT_TOLERANCE if name.endswith(("bf16", "int8")) else TOLERANCE
        off = check_agreement(name, weights[name], weights[reference], start, tolerance=tolerance)
        way = f"{off:.1e} of the way gone from {reference}"
        yield f"same work: after {steps} steps {name} is {way} (bf16 weight)"
    pair = ("ours_nvme_fp32", "ours_cpu_fp32")
    if tier.on_disk and weights.keys() >= set(pair):
        check_equal(pair[0], *(weights[name] for name in pair))
        yield f"same work: after {steps} steps {pair[0]} is bit-equal to {pair[1]} (bf16 weight)"


@dataclass(frozen=True)
class Race:
    """How long to race, with how many elements, and where logs and states go."""

    elements: int
    rounds: int
    warmup_rounds: int
    logs: Path
    folder: Path

    def run(self, tier: Tier, weights: dict[str, Tensor]) -> OptimizerReport:
        """Race a tier. Its weights are added to those of the tiers before, and compared with them."""
        not_measured: dict[str, str] = {}
        with ExitStack() as stack:
            workers = _start(tier, self.elements, self.logs, self.folder, stack, not_measured)
            contenders = [Contender(name, worker.run) for name, worker in workers.items()]
            contenders += _fio(self.elements, self.folder, not_measured) if tier.on_disk else []
            samples = race(contenders, rounds=self.rounds, warmup_rounds=self.warmup_rounds)
            samples.not_measured = not_measured
            own = [name for name in workers if name.startswith("ours")]
            kept = {name: workers[name].ask("state_bytes") for name in own}
            notes = [f"logged by {name}: {text}" for name in own for text in workers[name].messages()]
            weights |= {name: workers[name].weight() for name in workers if name not in ("plain", "torch")}
        if tier.on_disk:
            check_ended(samples, workers)
            notes.append(f"states are on {file_system(self.folder) or 'an unknown file system'}")
            notes += _limits(samples, tier, self.elements)
        start = Model(self.elements, PARTS).weight()
        notes += _same_work(tier, weights, start, self.warmup_rounds + self.rounds)
        return OptimizerReport(
            tier.title, self.elements, self.rounds, samples, tier.measures, tier.comparisons, (), notes,
            rows=tier.rows, state_bytes=kept,
        )  # fmt: skip


@pytest.fixture(scope="module")
def reports(
    pytestconfig: pytest.Config,
    publish: Callable[[OptimizerReport], OptimizerReport],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, OptimizerReport]:
    option = pytestconfig.getoption
    logs = tmp_path_factory.mktemp("optimizer")
    weights: dict[str, Tensor] = {}
    found = {}
    with TemporaryDirectory(prefix="peftds_bench_optimizer_", dir=option("nvme_path") or logs) as folder:
        runs = Race(option("elements"), option("rounds"), option("warmup_rounds"), logs, Path(folder))
        for name, tier in TIERS.items():
            if option("tier") in (name, "all"):
                found[name] = publish(runs.run(tier, weights))
    return found


def _of(tier: str, reports: dict[str, OptimizerReport]) -> OptimizerReport:
    if tier not in reports:
        pytest.skip("left out by --tier")
    return reports[tier]


@pytest.mark.benchmark(timer=recorded_clock)
@pytest.mark.parametrize(
    ("tier", "measure"),
    [pytest.param(name, row, id=row.label) for name, tier in TIERS.items() for row in tier.measures],
)
def test_row(
    tier: str,
    measure: Measure,
    reports: dict[str, OptimizerReport],
    record: Callable[[OptimizerReport, Measure], None],
) -> None:
    record(_of(tier, reports), measure)


@pytest.mark.parametrize(
    ("tier", "comparison"),
    [pytest.param(name, one, id=one.label) for name, tier in TIERS.items() for one in tier.comparisons],
)
def test_target(
    tier: str,
    comparison: Comparison,
    reports: dict[str, OptimizerReport],
    hold: Callable[[OptimizerReport, Comparison], None],
) -> None:
    hold(_of(tier, reports), comparison)
