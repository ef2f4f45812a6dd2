# SPDX-License-Identifier: Apache-2.0
"""What ``peftds doctor`` finds out about the machine: cores, memory and its limits, GPUs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from peftds_ext.cli.checks import Check

LOW_MEMLOCK_BYTES: Final = 64 << 20
"""Below this, pinned offload buffers do not fit under the limit on locked memory."""

_CAP_IPC_LOCK: Final = 14  # linux/capability.h
_UNLIMITED_BYTES: Final = 1 << 60  # cgroup v1 writes "no limit" as a number of about this size


def check_threads() -> Iterator[Check]:
    """Threads that torch and so the CPU kernels use, against the cores that this process may use."""
    import torch

    threads = torch.get_num_threads()
    usable = len(psutil.Process().cpu_affinity())
    physical, logical = psutil.cpu_count(logical=False), psutil.cpu_count(logical=True)
    value = (
        f"{threads} in torch; {usable} logical cores usable of {logical} ({physical or 'unknown'} physical)"
    )
    if threads == 1 < usable:
        remedy = "torchrun sets OMP_NUM_THREADS=1: set it to the usable cores divided by the ranks per node"
        yield Check("threads", "warning", f"{value}: the CPU step runs on one core", remedy)
    elif threads > usable:
        remedy = f"set OMP_NUM_THREADS to {usable}, divided by the ranks per node"
        yield Check("threads", "warning", f"{value}: threads compete for cores", remedy)
    else:
        yield Check("threads", "ok", value)


def check_memory() -> Iterator[Check]:
    """Host memory, and the limit that a container or a job scheduler puts on it."""
    memory = psutil.virtual_memory()
    yield Check("memory", "ok", f"{gib(memory.total)} in all, {gib(memory.available)} available")
    limit = cgroup_limit()
    if limit is None or limit >= memory.total:
        yield Check("memory limit", "ok", "none")
    else:
        yield Check("memory limit", "note", f"{gib(limit)}: the process is killed above it (cgroup)")


def check_memlock(*, pinned: bool) -> Iterator[Check]:
    """The limit on locked memory; ``pinned`` tells whether buffers are going to be locked."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        yield Check("locked memory", "ok", "no limit")
    elif may_lock_all():
        yield Check("locked memory", "ok", f"{mib(limit)}, which does not bind this process (CAP_IPC_LOCK)")
    elif limit < LOW_MEMLOCK_BYTES and pinned:
        yield Check(
            "locked memory",
            "warning",
            f"at most {mib(limit)}, and offload buffers are pinned",
            'ulimit -l unlimited (containers: --ulimit memlock=-1), or "pin_memory": false',
        )
    else:
        yield Check("locked memory", "ok", f"at most {mib(limit)}")


def check_storage_engine() -> Iterator[Check]:
    """Whether files are read and written by io_uring, and the reason if by threads."""
    from peftds_ext import _native
    from peftds_ext.errors import NativeLoadError

    try:
        engine = _native.core().Engine()
    except NativeLoadError:
        yield Check("storage engine", "note", "unknown: the compiled core is not loaded")
        return
    try:
        if engine.method == "io_uring":
            yield Check("storage engine", "ok", "io_uring")
        else:
            remedy = "threads reach the same bandwidth with more CPU time; nothing need be done"
            yield Check("storage engine", "note", f"{engine.method}: {engine.why_threads}", remedy)
    finally:
        engine.close()


def check_gpu() -> Iterator[Check]:
    """Names and memory of the GPUs that torch can use, or the reason why there are none."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        yield Check("GPU", "note", f"none: torch {torch.__version__} is built without CUDA")
        return
    if not torch.cuda.is_available():
        yield Check(
            "GPU",
            "warning",
            f"none: {_cuda_failure()}",
            "nvidia-smi must list a device, and its driver must be new enough for "
            f"CUDA {torch.version.cuda or torch.version.hip}",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Check(f"GPU {index}", "ok", f"{properties.name}, {gib(properties.total_memory)}")


def cgroup_limit(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the least memory limit, in bytes, on the way from this process's cgroup up to ``root``.

    Understands cgroup v2 and v1. None if there is no limit, or no cgroup file system.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits_above(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_above(root / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def may_lock_all(status: Path = Path("/proc/self/status")) -> bool:
    """Tell whether the process has CAP_IPC_LOCK, under which the limit on locked memory does not bind."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def gib(size: int) -> str:
    """Write a number of bytes in GiB."""
    return f"{size / (1 << 30):.1f} GiB"


def mib(size: int) -> str:
    """Write a number of bytes in MiB."""
    return f"{size / (1 << 20):g} MiB"


def _limits_above(root: Path, path: str, name: str) -> Iterator[int]:
    folder = root / path.lstrip("/")
    for place in (folder, *folder.parents):
        if place.is_relative_to(root):
            try:
                text = (place / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < _UNLIMITED_BYTES:
                yield int(text)


def _cuda_failure() -> str:
    """Let torch say why CUDA does not start: using it raises, ``is_available`` only returns False."""
    import torch

    try:
        torch.cuda.current_device()
    except Exception as error:
        return " ".join(str(error).split())
    return "torch finds no CUDA device"
