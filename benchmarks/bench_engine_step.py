# SPDX-License-Identifier: Apache-2.0
"""Gradient hand-over plus ``engine.step()`` of a stock and of our ZeRO-3 engine, one rank, CPU offload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agreement import check_agreement
from engine_process import EngineProcess
from interleave import Comparison, Contender, Measure, NotMeasured, race
from replay import recorded_clock
from report import Report

pytestmark = pytest.mark.timeout(3600)

# Bytes per element of a step: stock scales (8), runs Adam (28) and casts (6); ours makes one pass (28).
# The norm is part of backward in both.
STOCK_BACKWARD = Measure("stock backward", "stock", ("backward",))
STOCK_STEP = Measure("stock step", "stock", ("step",), 42)
STOCK_SUM = Measure("stock backward + step", "stock", ("backward", "step"))
STOCK_ALL = Measure("stock forward + backward + step", "stock", ("forward", "backward", "step"))
DEFAULT_STEP = Measure("stock, default settings: step", "stock_default", ("step",), 42)
DEFAULT_SUM = Measure("stock, default settings: backward + step", "stock_default", ("backward", "step"))
OURS_BACKWARD = Measure("ours backward", "ours", ("backward",))
OURS_STEP = Measure("ours step", "ours", ("step",), 28)
OURS_SUM = Measure("ours backward + step", "ours", ("backward", "step"))
OURS_ALL = Measure("ours forward + backward + step", "ours", ("forward", "backward", "step"))
PLAIN_BACKWARD = Measure("the model's own backward (no DeepSpeed)", "plain", ("backward",))
PLAIN_ALL = Measure("the model's own forward + backward", "plain", ("forward", "backward"))
COPY = Measure("memory: fp32 copy", "bandwidth", ("copy",), 8)
SCALE = Measure("memory: fp32 scale in place", "bandwidth", ("scale",), 8)

MEASURES = (
    STOCK_BACKWARD, STOCK_STEP, STOCK_SUM, STOCK_ALL, DEFAULT_STEP, DEFAULT_SUM,
    OURS_BACKWARD, OURS_STEP, OURS_SUM, OURS_ALL, PLAIN_BACKWARD, PLAIN_ALL, COPY, SCALE,
)  # fmt: skip
COMPARISONS = (
    Comparison("step", OURS_STEP, (STOCK_STEP, DEFAULT_STEP), target=1.6),
    Comparison("backward + step", OURS_SUM, (STOCK_SUM, DEFAULT_SUM), target=3.0),
)

TOLERANCE = 1e-3
"""bf16 weights of the two engines, relative to the way gone."""

ANSWER_TIMEOUT_S = 900.0
"""Longest wait for a worker; the first one of a stock engine may have to compile its op."""


# Tried for stock on a two-core machine, alternating, 20 million elements: reduce_scatter off takes a fifth
# off backward; overlap_comm, contiguous_gradients and a bucket of half the size make no difference beyond
# the noise; a parameter kept gathered (persistence threshold above its size) makes the step 2.8 times as
# long; pinned memory has no meaning on the CPU accelerator.
BEST_SETTINGS = {"reduce_scatter": False, "overlap_comm": False, "contiguous_gradients": True}


def config(elements: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed configuration; ``settings`` go into ``zero_optimization``."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "cpu", "pin_memory": False},
            # One bucket holds the whole parameter; a small parameter is partitioned like a large one.
            "reduce_bucket_size": elements,
            "stage3_param_persistence_threshold": 0,
            **settings,
        },
    }


def contender_settings(elements: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the kind and the configuration of each worker. Ours is stock's best plus our section."""
    best = config(elements, BEST_SETTINGS)
    return {
        "stock": ("stock", best),
        "ours": ("ours", {**best, "peftds_ext": {"enabled": True}}),
        "stock_default": ("stock", config(elements, {})),
        "plain": ("plain", {}),
    }


def _notes(report: Report) -> list[str]:
    """Return the limit that the hardware sets, and how near we come."""
    limit = report.median(PLAIN_BACKWARD) + 28 * report.elements / report.bandwidth()
    notes = [
        "limit of backward + step, from the model's own backward and 28 B/element at the best measured rate: "
        f"{limit * 1e3:.3f} ms"
    ]
    try:
        notes.append(f"ours backward + step takes {report.median(OURS_SUM) / limit:.2f} of this limit's time")
    except NotMeasured as reason:
        notes.append(f"ours backward + step: not measured: {reason}")
    return notes


def _same_work(workers: dict[str, EngineProcess], rounds: int) -> Iterator[str]:
    """Compare the bf16 weights of all engines with stock's; yield the notes."""
    if "stock" not in workers:
        yield "same work: not checked, since there is no stock engine to compare with"
        return
    start, stock = workers["plain"].weight(), workers["stock"].weight()
    for name in sorted(workers.keys() - {"plain", "stock"}):
        off = check_agreement(name, workers[name].weight(), stock, start, tolerance=TOLERANCE)
        yield f"same work: after {rounds} steps {name} is {off:.1e} of the way gone from stock (bf16 weight)"


@pytest.fixture(scope="module")
def report(
    pytestconfig: pytest.Config, publish: Callable[[Report], Report], tmp_path_factory: pytest.TempPathFactory
) -> Report:
    elements, rounds = pytestconfig.getoption("elements"), pytestconfig.getoption("rounds")
    warmup_rounds = pytestconfig.getoption("warmup_rounds")
    folder: Path = tmp_path_factory.mktemp("engines")
    workers: dict[str, EngineProcess] = {}
    not_measured: dict[str, str] = {}
    with ExitStack() as stack:
        for name, (kind, settings) in contender_settings(elements).items():
            try:
                arguments = ["--kind", kind, "--elements", str(elements), "--config", json.dumps(settings)]
                worker = EngineProcess(name, arguments, folder, timeout_s=ANSWER_TIMEOUT_S)
            except NotMeasured as reason:
                not_measured[name] = str(reason)
            else:
                workers[name] = stack.enter_context(worker)
        contenders = [Contender(name, worker.run) for name, worker in workers.items()]
        contenders.append(Contender("bandwidth", lambda: workers["plain"].run("bandwidth")))
        samples = race(contenders, rounds=rounds, warmup_rounds=warmup_rounds)
        samples.not_measured = not_measured
        notes = list(_same_work(workers, warmup_rounds + rounds))
        if "ours" in workers:
            notes += [f"logged by ours: {message}" for message in workers["ours"].messages()]
    report = Report(
        "ZeRO-3 engine, one rank, CPU offload",
        elements,
        rounds,
        samples,
        MEASURES,
        COMPARISONS,
        (COPY, SCALE),
        notes,
    )
    report.notes += _notes(report)
    return publish(report)


@pytest.mark.benchmark(timer=recorded_clock)
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.label)
def test_row(measure: Measure, report: Report, record: Callable[[Report, Measure], None]) -> None:
    record(report, measure)


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.label)
def test_target(comparison: Comparison, report: Report, hold: Callable[[Report, Comparison], None]) -> None:
    hold(report, comparison)
