# SPDX-License-Identifier: Apache-2.0
"""Each benchmark, small, in a process of its own: it runs, measures, and says what it could not measure."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest

import peftds_ext

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MINIATURE = ("--elements", "20000", "--rounds", "3", "--warmup-rounds", "1")

HAS_DEEPSPEED = util.find_spec("deepspeed") is not None

# Per benchmark: rows that need no compiler, and rows that need stock DeepSpeed's compiled op.
OURS = {
    "bench_adamw.py": {
        "ours, fp32 gradient",
        "ours, bf16 gradient, bf16 write",
        "torch AdamW(fused=True), fp32",
        "memory: fp32 copy",
        "memory: fp32 scale in place",
    },
    "bench_engine_step.py": {
        "the model's own backward (no DeepSpeed)",
        "the model's own forward + backward",
        "memory: fp32 copy",
        "memory: fp32 scale in place",
        *(["ours backward", "ours step", "ours backward + step"] if HAS_DEEPSPEED else []),
    },
}
STOCK = {
    "bench_adamw.py": {"DeepSpeedCPUAdam alone, fp32", "stock ZeRO-3 chain, bf16 gradient"},
    "bench_engine_step.py": {"stock backward", "stock step", "stock, default settings: backward + step"},
}

pytestmark = pytest.mark.timeout(900)  # the first run may have to compile DeepSpeed's op


def run(
    benchmark: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run one benchmark from ``folder``; return the finished process and where its JSON should be."""
    output = folder / "result.json"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    package = str(Path(peftds_ext.__file__).parents[1])
    inherited["PYTHONPATH"] = os.pathsep.join([package, inherited.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(BENCHMARKS / benchmark)]
    process = subprocess.run(
        [*command, "--benchmark-json", str(output), *arguments],
        cwd=folder,
        env={**inherited, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return process, output


def without_compiler(folder: Path) -> dict[str, str]:
    """Return variables under which nothing can be compiled, and nothing compiled earlier is found."""
    no_tools = folder / "bin"
    no_tools.mkdir()
    return {"PATH": str(no_tools), "CXX": str(no_tools / "c++"), "TORCH_EXTENSIONS_DIR": str(folder)}


def measured(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON's entries by the label of their row."""
    return {entry["extra_info"]["label"].strip(): entry for entry in result["benchmarks"]}


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, dict[str, Any]]]:
    """Return a function that runs a benchmark once per module; it returns what was printed, and the JSON."""

    @functools.cache
    def run_once(benchmark: str) -> tuple[str, dict[str, Any]]:
        process, output = run(benchmark, tmp_path_factory.mktemp("miniature"), *MINIATURE)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout, json.loads(output.read_text())

    return run_once


@pytest.mark.parametrize("benchmark_file", sorted(OURS))
def test_runs_and_accounts_for_every_row(
    benchmark_file: str, miniature: Callable[[str], tuple[str, dict[str, Any]]]
) -> None:
    table, result = miniature(benchmark_file)
    entries = measured(result)

    assert OURS[benchmark_file] <= entries.keys()
    for entry in entries.values():
        assert entry["stats"]["rounds"] == 3
        assert entry["stats"]["min"] > 0.0
        phases = list(entry["extra_info"]["phase_medians_s"].values())
        if len(phases) == 1:
            assert entry["stats"]["median"] == pytest.approx(phases[0], rel=1e-3)
    (report,) = result["reports"]
    for label in STOCK[benchmark_file] - entries.keys():
        (row,) = [line for line in table.splitlines() if line.strip().startswith(f"{label}  ")]
        assert "not measured: " in row
    assert report["is_miniature"]
    assert "this shows that the benchmark runs, and nothing else" in table
    for ratio in report["ratios"]:
        assert ("speed" in ratio) != ("not_measured" in ratio)
    if STOCK[benchmark_file] <= entries.keys():
        assert all(ratio["speed"] > 0.0 for ratio in report["ratios"])
        assert any(note.startswith("same work: ") for note in report["notes"])


@pytest.mark.parametrize("benchmark_file", sorted(OURS))
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_without_a_compiler_only_stock_is_missing_and_the_table_says_why(
    benchmark_file: str, tmp_path: Path
) -> None:
    process, output = run(benchmark_file, tmp_path, *MINIATURE, environment=without_compiler(tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(output.read_text())

    assert measured(result).keys() >= OURS[benchmark_file]
    assert measured(result).keys().isdisjoint(STOCK[benchmark_file])
    for label in STOCK[benchmark_file]:
        (row,) = [line for line in process.stdout.splitlines() if line.strip().startswith(f"{label}  ")]
        assert "not measured: DeepSpeed's cpu_adam op cannot be loaded or built: " in row
    (report,) = result["reports"]
    assert all("not_measured" in ratio for ratio in report["ratios"])


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_targets_fail_when_a_baseline_is_missing(tmp_path: Path) -> None:
    arguments = ("--elements", "2000", "--rounds", "7", "--check-targets")
    process, _ = run("bench_adamw.py", tmp_path, *arguments, environment=without_compiler(tmp_path))
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    for ratio in ("fp32 step", "bf16 step, whole chain"):
        assert f"Failed: {ratio}: not measured: DeepSpeed's cpu_adam op cannot be" in process.stdout


def test_json_tells_machine_and_command(
    miniature: Callable[[str], tuple[str, dict[str, Any]]],
) -> None:
    _, result = miniature("bench_adamw.py")
    facts = result["machine_info"]["peftds_ext"]
    assert facts["cpus_usable"] == len(os.sched_getaffinity(0))
    assert facts["peftds_ext"] == peftds_ext.__version__
    assert facts["peftds_ext_isa"] in facts["isas_available"]
    assert facts["torch_threads"] >= 1
    assert "--elements 20000" in result["command_line"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--rounds", "3", "--check-targets"), "--check-targets needs --rounds of at least 7"),
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("--elements", "0"), "--elements must be at least 1, got 0"),
        (("--warmup-rounds", "-1"), "--warmup-rounds must be at least 0, got -1"),
    ],
)
def test_refuses_options_that_give_no_result(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    process, output = run("bench_adamw.py", tmp_path, *arguments)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert complaint in process.stderr
    assert not output.exists() or not output.read_text()
