# SPDX-License-Identifier: Apache-2.0
"""What ``peftds doctor`` finds out about the installed software, and the list of all its checks."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from peftds_ext import env
from peftds_ext.errors import ConfigError, NativeLoadError

Status: TypeAlias = Literal["ok", "note", "warning", "error"]

_PACKAGES: Final = ("torch", "peftds_ext", "deepspeed", "peft", "transformers", "accelerate")


@dataclass(frozen=True)
class Check:
    """One finding. ``error`` means that training with the engine would fail."""

    name: str
    status: Status
    value: str
    remedy: str = ""


Probe: TypeAlias = Callable[[], Iterator[Check]]


def run_checks(config_path: Path | None = None) -> list[Check]:
    """Run every check, and those of a DeepSpeed configuration file if one is given.

    Imports torch and DeepSpeed, which may print. A check that fails to run becomes an error itself;
    nothing is raised.
    """
    from peftds_ext.cli.config_checks import check_config_file, reads_pinned
    from peftds_ext.cli.machine_checks import (
        check_gpu,
        check_memlock,
        check_memory,
        check_storage_engine,
        check_threads,
    )

    probes: dict[str, Probe] = {
        "versions": check_versions,
        "compiled core": check_core,
        "threads": check_threads,
        "memory": check_memory,
        "locked memory": lambda: check_memlock(pinned=reads_pinned(config_path)),
        "storage engine": check_storage_engine,
        "GPU": check_gpu,
        "CUDA kernels": check_cuda_kernels,
        "DeepSpeed support": check_deepspeed_support,
    }
    if config_path is not None:
        path = config_path
        probes["configuration file"] = lambda: check_config_file(path)
    return [check for name, probe in probes.items() for check in _guarded(name, probe)]


def check_versions() -> Iterator[Check]:
    """Versions of Python and of the packages that take part."""
    yield Check("python", "ok", platform.python_version())
    for package in _PACKAGES:
        version = _version(package)
        yield Check(package, "ok" if version else "note", version or "not installed")


def check_core() -> Iterator[Check]:
    """Whether the compiled core is loaded, and the instruction set that its kernels use."""
    from peftds_ext import _native

    try:
        core = _native.core()
    except NativeLoadError as error:
        yield Check(
            "compiled core",
            "error",
            str(error),
            "build the package for this Python and torch: pip install --no-build-isolation .",
        )
        return
    yield Check("compiled core", "ok", "loaded")
    available = ", ".join(core.available_cpu_isas())
    try:
        chosen = core.cpu_isa()
    except ConfigError as error:
        yield Check("instruction set", "error", str(error), f"unset {env.CPU_ISA}, or set it to: {available}")
        return
    forced = env.forced_cpu_isa() is not None
    yield Check(
        "instruction set",
        "note" if forced else "ok",
        f"{chosen} ({f'forced by {env.CPU_ISA}; ' if forced else ''}available: {available})",
    )


def check_cuda_kernels() -> Iterator[Check]:
    """Whether the CUDA kernels are loaded; their absence matters only where torch can use a GPU."""
    import torch

    from peftds_ext import _native

    try:
        loaded, reason = _native.cuda_status()
    except NativeLoadError:
        yield Check("CUDA kernels", "note", "not loaded: the compiled core is not loaded either")
        return
    if loaded:
        yield Check("CUDA kernels", "ok", "loaded")
    elif torch.cuda.is_available():
        remedy = "build the package where the CUDA toolkit is, with FORCE_CUDA=1 to see what is missing"
        yield Check("CUDA kernels", "warning", f"not loaded: {reason}", remedy)
    else:
        yield Check("CUDA kernels", "note", f"not loaded: {reason}")


def check_deepspeed_support() -> Iterator[Check]:
    """Whether the engine can plug into the installed DeepSpeed."""
    from peftds_ext.integrations.deepspeed import versions

    version, supported, reason = versions.describe()
    if supported:
        yield Check("DeepSpeed support", "ok", f"{version}: {reason}")
    else:
        remedy = f"pip install 'deepspeed{versions.SUPPORTED}'"
        yield Check("DeepSpeed support", "error", reason, remedy)


def _guarded(name: str, probe: Probe) -> Iterator[Check]:
    try:
        yield from probe()
    except Exception as error:  # the report must come out on exactly the machines where things are broken
        yield Check(name, "error", f"the check itself failed: {type(error).__name__}: {error}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package != "peftds_ext":
            return None
    # Run from a source tree, without an installation.
    from peftds_ext import __version__

    return __version__
