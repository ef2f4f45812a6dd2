# SPDX-License-Identifier: Apache-2.0
"""Options, the printed tables, and the additions to pytest-benchmark's JSON."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import pytest
import storage
from interleave import Comparison, Measure, NotMeasured
from replay import replay
from report import LEAST_ROUNDS, Report

REPORTS = pytest.StashKey[list[Report]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peftds_ext benchmarks")
    group.addoption(
        "--elements", type=int, default=50_000_000, help="parameter elements (default 50 million)"
    )
    group.addoption(
        "--rounds", type=int, default=11, help=f"measured rounds; at least {LEAST_ROUNDS} for a result"
    )
    group.addoption("--warmup-rounds", type=int, default=3, help="rounds before these, not counted")
    group.addoption(
        "--check-targets", action="store_true", help="fail where a ratio misses its target or is not measured"
    )
    storage_group = parser.getgroup("peftds_ext benchmarks: storage")
    storage_group.addoption(
        "--io-bytes", type=int, default=1 << 30, help="bytes of each file of bench_io.py (default 1 GiB)"
    )
    storage_group.addoption(
        "--io-path",
        type=Path,
        default=Path(),
        help="folder on the disk to measure (default: here)",
    )
    storage_group.addoption(
        "--io-any-folder", action="store_true", help="also a folder in memory, or without direct I/O"
    )
    optimizer_group = parser.getgroup("peftds_ext benchmarks: bench_optimizer.py")
    optimizer_group.addoption(
        "--nvme-path", type=Path, help="folder on the disk for states (default: pytest's temporary folder)"
    )
    optimizer_group.addoption(
        "--tier", choices=("cpu", "nvme", "all"), default="all", help="where states are (default: all)"
    )
    stream_group = parser.getgroup("peftds_ext benchmarks: bench_stream.py, bench_start.py")
    stream_group.addoption(
        "--checkpointing", action="store_true", help="compute activations again in the backward pass"
    )
    stream_group.addoption(
        "--budget", type=int, default=0, help="params.host_bytes of ours in bench_start.py (default 0)"
    )
    for name, default, meaning in (
        ("hidden", 1024, "width of the model"),
        ("layers", 12, "decoder layers"),
        ("vocabulary", 8000, "token ids"),
        ("tokens", 128, "tokens of a step"),
    ):
        stream_group.addoption(f"--{name}", type=int, default=default, help=f"{meaning} (default {default})")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORTS] = []
    for option, least in (("elements", 1), ("rounds", 1), ("warmup_rounds", 0)):
        value = config.getoption(option)
        if value < least:
            raise pytest.UsageError(f"--{option.replace('_', '-')} must be at least {least}, got {value}")
    folder = config.getoption("nvme_path")
    if folder is not None and not folder.is_dir():
        raise pytest.UsageError(f"--nvme-path must be a folder, which {folder} is not")
    if config.getoption("check_targets") and config.getoption("rounds") < LEAST_ROUNDS:
        raise pytest.UsageError(f"--check-targets needs --rounds of at least {LEAST_ROUNDS}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a folder that gives no result before anything is measured."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    for module in modules:
        if module.__name__ != "bench_io":
            continue
        options = session.config.option
        reason = storage.complaint(
            options.io_path, options.io_bytes, len(module.SUBJECTS), any_folder=options.io_any_folder
        )
        if reason is not None:
            raise pytest.UsageError(reason)


@pytest.fixture(scope="session")
def publish(pytestconfig: pytest.Config) -> Callable[[Report], Report]:
    """Register a report, so that its table is printed and its ratios reach the JSON."""

    def register(report: Report) -> Report:
        pytestconfig.stash[REPORTS].append(report)
        return report

    return register


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Report, Measure], None]:
    """Make one row of a report a pytest-benchmark entry, or skip with the reason why there is none."""

    def replay_row(report: Report, measure: Measure) -> None:
        try:
            seconds = report.seconds(measure)
        except NotMeasured as reason:
            pytest.skip(f"not measured: {reason}")
        benchmark = request.getfixturevalue("benchmark")
        benchmark.group = report.title
        benchmark.extra_info.update(
            label=measure.label,
            elements=report.elements,
            bytes_per_element=measure.bytes_per_element,
            bytes_per_second=report.rate(measure),
            phase_medians_s={
                phase: statistics.median(
                    measured[phase] for measured in report.samples.rounds[measure.contender]
                )
                for phase in measure.phases
            },
        )
        benchmark.pedantic(replay(seconds), rounds=len(seconds), iterations=1)

    return replay_row


@pytest.fixture
def hold(pytestconfig: pytest.Config) -> Callable[[Report, Comparison], None]:
    """Compare a ratio with its target; fails only under ``--check-targets``."""

    def check(report: Report, comparison: Comparison) -> None:
        strict = pytestconfig.getoption("check_targets")
        try:
            speed = report.ratio(comparison).speed
        except NotMeasured as reason:
            if strict and comparison.target is not None:
                pytest.fail(f"{comparison.label}: not measured: {reason}")
            pytest.skip(f"not measured: {reason}")
        if strict and comparison.target is not None and speed < comparison.target:
            pytest.fail(f"{comparison.label}: {speed:.3f}x, target {comparison.target}x")

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for report in config.stash[REPORTS]:
        terminalreporter.section(report.title)
        for line in report.lines():
            terminalreporter.write_line(line)
    if config.stash[REPORTS]:
        terminalreporter.section("machine")
        for name, value in machine.facts().items():
            terminalreporter.write_line(f"{name}: {value}")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["peftds_ext"] = machine.facts()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    output_json["command_line"] = shlex.join(sys.orig_argv)
    output_json["reports"] = [report.as_json() for report in config.stash[REPORTS]]
