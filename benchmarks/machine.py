# SPDX-License-Identifier: Apache-2.0
"""What a measurement depends on: the machine, the versions, the threads."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

import peftds_ext
from peftds_ext import _native

_VARIABLES = (
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "PEFTDS_CPU_ISA",
)  # fmt: skip


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _transparent_huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")]


def facts() -> dict[str, Any]:
    """Return machine facts for the JSON; sizes in bytes."""
    core = _native.core()
    return {
        "cpu_model": _cpu_model(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "cpus_logical": psutil.cpu_count(logical=True),
        "cores_physical": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "transparent_huge_pages": _transparent_huge_pages(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "deepspeed": _version("deepspeed"),
        "peftds_ext": peftds_ext.__version__,
        "peftds_ext_isa": core.cpu_isa(),
        "isas_available": core.available_cpu_isas(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
