# SPDX-License-Identifier: Apache-2.0
"""The report: what is an error, what is only told, and that JSON output is nothing but JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from peftds_ext import _native
from peftds_ext.cli import checks
from peftds_ext.cli.checks import Check, run_checks
from peftds_ext.cli.doctor import doctor
from peftds_ext.errors import NativeLoadError
from peftds_ext.integrations.deepspeed import versions

app = typer.Typer()
app.command()(doctor)


@pytest.fixture(autouse=True)
def supported_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the import of DeepSpeed, which has its own tests, out of those of the report."""
    monkeypatch.setattr(versions, "describe", lambda: ("0.19.8", True, "in the supported range"))


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def _report(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = _run("--json", *arguments)
    report = json.loads(result.stdout)
    assert set(report) == {"ok", "checks"}
    assert report["ok"] is (result.exit_code == 0)
    return result.exit_code, {check["name"]: check for check in report["checks"]}


def _only(found: Any) -> Check:
    (check,) = list(found)
    return check


def _write(folder: Path, raw: object) -> Path:
    path = folder / "ds.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path


# the command


def test_machine_that_runs_the_tests_is_fit() -> None:
    status, found = _report()
    assert status == 0
    assert found["torch"]["value"] == torch.__version__
    assert found["compiled core"]["status"] == "ok"
    assert {"python", "deepspeed", "instruction set", "threads", "memory", "locked memory"} <= set(found)


def _errors_in_new_process(*arguments: str, first: str = "", **environment: str) -> dict[str, dict[str, str]]:
    """Run the command where nothing is imported yet, after the statement ``first``; return the errors."""
    program = f"{first}\nimport typer\nfrom peftds_ext.cli.doctor import doctor\ntyper.run(doctor)"
    run = subprocess.run(
        [sys.executable, "-c", program, "--json", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        check=False,
    )
    report = json.loads(run.stdout)
    assert run.returncode == (0 if report["ok"] else 1)
    return {check["name"]: check for check in report["checks"] if check["status"] == "error"}


def test_json_is_all_there_is_on_stdout_even_when_deepspeed_prints(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path = _write(tmp_path, {"peftds_ext": {"enabled": True}, "compile": {"deepcompile": True}})
    errors = _errors_in_new_process("--config", str(path), PEFTDS_CPU_ISA="nonsense")
    assert set(errors) == {"instruction set", "compile.deepcompile"}
    assert "PEFTDS_CPU_ISA" in errors["instruction set"]["remedy"]
    assert "scalar" in errors["instruction set"]["remedy"]


def test_report_comes_out_without_the_compiled_core(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path = _write(tmp_path, {"peftds_ext": {"enable": True}})
    block = "import sys; sys.modules['peftds_ext._native._core'] = None"
    errors = _errors_in_new_process("--config", str(path), first=block)
    assert set(errors) == {"compiled core", "section peftds_ext"}


def test_report_comes_out_without_optional_packages(tmp_path: Path) -> None:
    path = _write(tmp_path, {"peftds_ext": {"enabled": True}})
    names = ("deepspeed", "hjson", "transformers", "peft", "accelerate")
    block = f"import sys; sys.modules.update(dict.fromkeys({names!r}))"
    errors = _errors_in_new_process("--config", str(path), first=block)
    assert set(errors) == {"DeepSpeed support"}
    assert "not installed" in errors["DeepSpeed support"]["value"]


def test_table_shows_value_and_remedy_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Check("one", "warning", "kept [deepspeed]", "do [this]"), Check("two", "note", "x")]
    monkeypatch.setattr("peftds_ext.cli.doctor.run_checks", lambda config: found)
    result = _run()
    assert result.exit_code == 0
    assert "kept [deepspeed]" in result.stdout
    assert "remedy: do [this]" in result.stdout
    assert "Nothing was found that would stop training" in result.stdout


def test_one_error_makes_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Check("one", "ok", "x"), Check("two", "error", "broken")]
    monkeypatch.setattr("peftds_ext.cli.doctor.run_checks", lambda config: found)
    result = _run()
    assert result.exit_code == 1
    assert "would fail" in result.stdout


def test_check_that_breaks_is_an_error_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(psutil, "virtual_memory", broken)
    found = {check.name: check for check in run_checks()}
    assert found["memory"].status == "error"
    assert "no /proc here" in found["memory"].value
    assert {"threads", "DeepSpeed support"} <= set(found)


# software


def test_core_that_is_not_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def core() -> None:
        raise NativeLoadError("no module _core")

    monkeypatch.setattr(_native, "core", core)
    check = _only(checks.check_core())
    assert check.status == "error"
    assert "no module _core" in check.value
    assert "pip install" in check.remedy


def test_forced_instruction_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    core = SimpleNamespace(cpu_isa=lambda: "scalar", available_cpu_isas=lambda: ["scalar", "avx2"])
    monkeypatch.setattr(_native, "core", lambda: core)
    monkeypatch.setenv("PEFTDS_CPU_ISA", "scalar")
    check = {check.name: check for check in checks.check_core()}["instruction set"]
    assert check.status == "note"
    assert check.value == "scalar (forced by PEFTDS_CPU_ISA; available: scalar, avx2)"


def test_package_that_is_not_installed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", ("no-such-package-here", "torch"))
    found = {check.name: check for check in checks.check_versions()}
    assert found["no-such-package-here"] == Check("no-such-package-here", "note", "not installed")
    assert found["torch"].status == "ok"


def test_unsupported_deepspeed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "describe", lambda: ("0.18.9", False, "0.18.9 is too old"))
    check = _only(checks.check_deepspeed_support())
    assert (check.status, check.value) == ("error", "0.18.9 is too old")
    assert versions.SUPPORTED in check.remedy


@pytest.mark.parametrize(("gpu", "status"), [(True, "warning"), (False, "note")])
def test_absent_cuda_kernels_matter_where_there_is_a_gpu(
    gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "cuda_status", lambda: (False, "not built"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    check = _only(checks.check_cuda_kernels())
    assert check.status == status
    assert "not built" in check.value
