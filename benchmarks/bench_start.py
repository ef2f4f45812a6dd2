# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint on the disk to the end of the first LoRA step: stock NVMe offload, and ours in place."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bench_stream import ANSWER_TIMEOUT_S, SHAPE, configs, swapped_bytes, write_checkpoint
from engine_process import EngineProcess, WorkerError
from interleave import Comparison, Contender, Measure, NotMeasured, Phases, race
from replay import recorded_clock
from report import Report

pytestmark = pytest.mark.timeout(7200)

WORKER = Path(__file__).with_name("start_worker.py")
LOSS_TOLERANCE = 1e-3
"""Relative, after the same steps; DeepSpeed's hooks change the order of sums."""

STOCK = Measure("stock, base on the disk: to the end of the first step", "stock", ("start",))
OURS = Measure("ours, in place: to the end of the first step", "ours", ("start",))
MEASURES = (STOCK, OURS)
COMPARISONS = (Comparison("start in place, by stock", OURS, (STOCK,), target=3.0),)


@dataclass
class Starts:
    """Starts of one kind, each in a new process."""

    kind: str
    arguments: list[str]
    folder: Path
    seen: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> Phases:
        """Start once; importing the libraries is not counted."""
        name = f"{self.kind}{len(self.seen)}"
        with EngineProcess(
            name, self.arguments, self.folder, timeout_s=ANSWER_TIMEOUT_S, worker=WORKER
        ) as worker:
            self.seen.append(worker.answer("round"))
        phases: Phases = self.seen[-1]["phases"]
        return phases


def _notes(starts: list[Starts]) -> Iterator[str]:
    for kind in starts:
        written = statistics.median(seen["written"] for seen in kind.seen)
        memory = statistics.median(seen["memory"] for seen in kind.seen)
        yield (
            f"{kind.kind}: {written / 1e6:.1f} MB written before the first step; memory at its peak "
            f"{memory / 1e6:.0f} MB above that of the process with the libraries imported"
        )
    losses = [kind.seen[-1]["losses"] for kind in starts]
    off = max(abs(a - b) / abs(b) for other in losses for a, b in zip(other, losses[0], strict=True))
    if off > LOSS_TOLERANCE:
        raise AssertionError(f"the kinds do other work: losses {off:.1e} apart")
    yield f"same work: losses of all kinds are within {off:.1e}"


@pytest.fixture(scope="module")
def report(
    pytestconfig: pytest.Config, publish: Callable[[Report], Report], tmp_path_factory: pytest.TempPathFactory
) -> Report:
    shape = {name: pytestconfig.getoption(name) for name in SHAPE}
    rounds, warmup_rounds = pytestconfig.getoption("rounds"), pytestconfig.getoption("warmup_rounds")
    folder = tmp_path_factory.mktemp("start")
    checkpoint = write_checkpoint(shape, folder / "checkpoint")
    settings = {"stock": configs(shape, folder)["stock_disk"][1]}
    settings["ours"] = configs(shape, folder)["ours_checkpoint_0"][1]
    settings["ours"]["peftds_ext"]["params"]["host_bytes"] = pytestconfig.getoption("budget")
    starts, not_measured = [], {}
    for kind, config in settings.items():
        arguments = ["--kind", kind, "--checkpoint", str(checkpoint), "--tokens", str(shape["tokens"])]
        arguments += ["--checkpointing"] if shape["checkpointing"] else []
        candidate = Starts(kind, [*arguments, "--config", json.dumps(config)], folder)
        try:
            candidate.run()
        except NotMeasured as reason:
            not_measured[kind] = str(reason)
        except WorkerError as error:
            if kind != "stock":
                raise
            not_measured[kind] = f"it fails: {str(error).strip().splitlines()[-1]}"
        else:
            candidate.seen.clear()
            starts.append(candidate)
    contenders = [Contender(kind.kind, kind.run) for kind in starts]
    samples = race(contenders, rounds=rounds, warmup_rounds=warmup_rounds)
    samples.not_measured = not_measured
    return publish(
        Report(
            f"start, {shape['layers']} layers of {shape['hidden']}, {shape['tokens']} tokens",
            swapped_bytes(shape),
            rounds,
            samples,
            MEASURES,
            COMPARISONS,
            (),
            list(_notes(starts)),
        )
    )


@pytest.mark.benchmark(timer=recorded_clock)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.label)
def test_row(measure: Measure, report: Report, record: Callable[[Report, Measure], None]) -> None:
    record(report, measure)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.label)
def test_target(comparison: Comparison, report: Report, hold: Callable[[Report, Comparison], None]) -> None:
    hold(report, comparison)
