# SPDX-License-Identifier: Apache-2.0
"""Threads, memory and its limits, GPUs, on machines other than this one."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from peftds_ext.cli import machine_checks
from peftds_ext.cli.checks import Check


def _only(found: Any) -> Check:
    (check,) = list(found)
    return check


@pytest.mark.parametrize(
    ("threads", "usable", "status", "words"),
    [(4, 4, "ok", ""), (1, 1, "ok", ""), (1, 4, "warning", "one core"), (8, 4, "warning", "compete")],
)
def test_threads(threads: int, usable: int, status: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: list(range(usable)))
    check = _only(machine_checks.check_threads())
    assert check.status == status
    assert words in check.value
    assert ("OMP_NUM_THREADS" in check.remedy) is (status == "warning")


@pytest.mark.parametrize(
    ("limit", "pinned", "privileged", "status"),
    [
        (8 << 20, True, False, "warning"),
        (8 << 20, False, False, "ok"),
        (8 << 20, True, True, "ok"),
        (64 << 20, True, False, "ok"),
        (resource.RLIM_INFINITY, True, False, "ok"),
    ],
)
def test_locked_memory(
    limit: int, pinned: bool, privileged: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(machine_checks, "may_lock_all", lambda: privileged)
    check = _only(machine_checks.check_memlock(pinned=pinned))
    assert check.status == status
    assert ("ulimit -l" in check.remedy) is (status == "warning")


@pytest.mark.parametrize(("mask", "expected"), [("0000000000004000", True), ("000001ffffffbfff", False)])
def test_capability_to_lock(mask: str, expected: bool, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapPrm:\tffffffffffffffff\nCapEff:\t{mask}\n")
    assert machine_checks.may_lock_all(status) is expected
    assert machine_checks.may_lock_all(tmp_path / "none") is False


CGROUPS: dict[str, tuple[str, dict[str, str], int | None]] = {
    "v2, own": ("0::/job\n", {"job/memory.max": "1000"}, 1000),
    "v2, a parent is tighter": (
        "0::/slice/job\n",
        {"slice/memory.max": "10", "slice/job/memory.max": "20"},
        10,
    ),
    "v2, none": ("0::/job\n", {"job/memory.max": "max"}, None),
    "v2, container root": ("0::/\n", {"memory.max": "77"}, 77),
    "v1": ("5:cpu:/a\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "55"}, 55),
    "v1, path of the host": ("4:memory:/docker/ab\n", {"memory/memory.limit_in_bytes": "44"}, 44),
    "v1, none": ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
    "no cgroup": ("", {}, None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_memory_limit(name: str, tmp_path: Path) -> None:
    membership, files, expected = CGROUPS[name]
    (tmp_path / "cgroup").write_text(membership)
    for place, text in files.items():
        path = tmp_path / "fs" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert machine_checks.cgroup_limit(tmp_path / "fs", tmp_path / "cgroup") == expected


def test_memory_limit_without_proc(tmp_path: Path) -> None:
    assert machine_checks.cgroup_limit(tmp_path, tmp_path / "none") is None


def test_limit_below_the_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "cgroup_limit", lambda: 1 << 30)
    found = {check.name: check for check in machine_checks.check_memory()}
    assert found["memory limit"].status == "note"
    assert "1.0 GiB" in found["memory limit"].value


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    check = _only(machine_checks.check_gpu())
    assert check.status == "note"
    assert "built without CUDA" in check.value


def test_driver_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver\non your system is too old")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    check = _only(machine_checks.check_gpu())
    assert check.status == "warning"
    assert "The NVIDIA driver on your system is too old" in check.value
    assert "13.0" in check.remedy


def test_each_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name=f"card {index}", total_memory=(index + 1) << 30),
    )
    found = {check.name: check.value for check in machine_checks.check_gpu()}
    assert found == {"GPU 0": "card 0, 1.0 GiB", "GPU 1": "card 1, 2.0 GiB"}
