# SPDX-License-Identifier: Apache-2.0
"""What ``import peftds_ext`` does and does not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peftds_ext

NO_CORE = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "peftds_ext._native._core":
            raise ImportError("undefined symbol: torch_of_another_day")
        return None

sys.meta_path.insert(0, Refuse())
"""


def test_import_is_light_silent_and_starts_no_thread(run_python: Callable[..., str]) -> None:
    output = run_python(
        """
import json, os, sys, warnings
import torch

warnings.simplefilter("error")
before, threads = set(sys.modules), len(os.listdir("/proc/self/task"))
import peftds_ext
after = len(os.listdir("/proc/self/task"))
print(json.dumps([sorted(set(sys.modules) - before), threads, after]))
"""
    )
    (line,) = output.splitlines()  # nothing else may be printed
    added, threads_before, threads_after = json.loads(line)
    heavy = {"deepspeed", "transformers", "peft", "accelerate", "pydantic", "rich", "typer", "psutil"}
    assert not heavy & {name.partition(".")[0] for name in added}
    assert "peftds_ext.ops" in added
    assert threads_after == threads_before


def test_import_writes_nothing_to_standard_error(run_python: Callable[..., str], tmp_path: Path) -> None:
    errors = tmp_path / "stderr"
    run_python(
        f"import os, torch; os.dup2(os.open({str(errors)!r}, os.O_WRONLY | os.O_CREAT), 2); import peftds_ext"
    )
    assert errors.read_text() == ""


def test_all_and_dir_name_what_can_be_had(run_python: Callable[..., str]) -> None:
    for name in peftds_ext.__all__:
        assert name in dir(peftds_ext)
        assert getattr(peftds_ext, name) is not None
    assert not hasattr(peftds_ext, "no_such_name")
    code = "from peftds_ext import *; print(FusedAdamW.__module__, callable(install), __version__)"
    assert run_python(code).split() == ["peftds_ext.optim.adamw", "True", peftds_ext.__version__]


def test_the_lazy_names_do_not_import_deepspeed(run_python: Callable[..., str]) -> None:
    code = (
        "import sys, peftds_ext; peftds_ext.install, peftds_ext.initialize; print('deepspeed' in sys.modules)"
    )
    assert run_python(code).strip() == "False"


def test_without_the_core_the_package_imports_and_says_what_to_do(run_python: Callable[..., str]) -> None:
    output = run_python(
        NO_CORE
        + """
import peftds_ext
from peftds_ext.errors import NativeLoadError

def from_ops():
    from peftds_ext import ops

def ops_attribute():
    peftds_ext.ops.squared_norm

def fused_adamw():
    peftds_ext.FusedAdamW

def from_fused_adamw():
    from peftds_ext import FusedAdamW

def core():
    peftds_ext._native.core()

for use in (from_ops, fused_adamw, from_fused_adamw, core, from_ops, ops_attribute):
    try:
        use()
    except NativeLoadError as error:
        print(error)
    else:
        raise SystemExit(f"{use.__name__}: no error")
"""
    )
    messages = output.splitlines()
    assert len(messages) == 6
    for message in messages:
        assert "torch_of_another_day" in message
        assert "pip install" in message


def test_without_the_core_the_parts_that_do_not_need_it_work(run_python: Callable[..., str]) -> None:
    output = run_python(
        NO_CORE
        + """
import peftds_ext, peftds_ext.config, peftds_ext.env, peftds_ext.planner, peftds_ext.cli.main
print(peftds_ext.__version__)
"""
    )
    assert output.strip() == peftds_ext.__version__
