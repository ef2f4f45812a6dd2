# SPDX-License-Identifier: Apache-2.0
"""Short LoRA runs with parameters on NVMe, and what became of them. Run in processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import limits
import torch
from ds_models import llama, lora, tokens
from ds_worker import Run
from torch import nn

STEPS = 4
SWAPPED = 6
"""Partitions on the disk: three of 1 MiB of each of two layers; the others are smaller."""


def config_of(run: Run, disk: str | None, io: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    offload = {"device": "nvme"} if disk is None else {"device": "nvme", "nvme_path": disk}
    config = run.config(zero={"offload_param": offload, "stage3_max_reuse_distance": 0, **zero})
    config["peftds_ext"] = {"enabled": True, "io": io or {}}
    return config


def engine_of(run: Run, disk: str | None, io: dict[str, Any] | None = None, seed: int = 0) -> Any:
    return run.initialize(lora(llama(hidden=512, seed=seed)), config_of(run, disk, io))


def step(engine: Any, batch: torch.Tensor) -> float:
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def swappers(model: nn.Module) -> set[Any]:
    return {getattr(p, "nvme_swapper", None) for p in model.parameters()} - {None}


def remains(disk: str) -> list[str]:
    """Run what runs at the end of a process; return what is then left below a folder."""
    atexit._run_exitfuncs()
    found = sorted(str(path.relative_to(disk)) for path in Path(disk).rglob("*"))
    return [name for name in found if name not in ("peftds_ext_swap", "peftds_ext_swap/.lock")]


def told(error: BaseException) -> dict[str, Any]:
    """Return what a caller sees of an error."""
    return {
        "classes": [kind.__name__ for kind in type(error).__mro__],
        "module": type(error).__module__,
        "errno": getattr(error, "errno", None),
        "filename": getattr(error, "filename", None),
        "text": str(error),
    }


def _data_file(disk: str) -> Path:
    (path,) = Path(disk).glob("peftds_ext_swap/*/data.bin")
    return path


def _truncate(disk: str) -> None:
    path = _data_file(disk)
    os.truncate(path, path.stat().st_size // 2)


def _flip(disk: str) -> None:
    with _data_file(disk).open("r+b") as file:
        file.seek((3 << 20) + 5)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _kill(disk: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


BETWEEN: dict[str, Callable[[str], None]] = {"truncate": _truncate, "flip": _flip, "kill": _kill}


def train(
    run: Run,
    disk: str | None,
    io: dict[str, Any] | None = None,
    after_two: str = "",
    mount: str = "",
    no_io_uring: bool = False,
    locked_memory: int = 0,
) -> dict[str, Any]:
    """Train; ``after_two`` names what happens after two steps. The error is returned, if there is one."""
    if mount:
        assert disk is not None
        if reason := limits.mount_in_memory(Path(disk), mount):
            return {"skip": reason}
    if no_io_uring:
        limits.forbid_io_uring()
    if locked_memory:
        limits.limit_locked_memory(locked_memory)
    result: dict[str, Any] = {"losses": [], "initialized": False}
    try:
        engine = engine_of(run, disk, io)
        result["initialized"] = True
        for number, batch in enumerate(tokens(STEPS)):
            if number == 2 and after_two:
                BETWEEN[after_two](str(disk))
            result["losses"].append(step(engine, batch))
        (swapper,) = swappers(engine.module)
        result["method"] = swapper._engine.method
        result["in shared memory"] = in_shared_memory()
    except Exception as error:
        result["error"] = told(error)
    result["remains"] = remains(disk) if disk is not None and Path(disk).is_dir() else None
    return result


def under_zero_init(run: Run, disk: str | None) -> dict[str, Any]:
    """Make a model under ``zero.Init``, before ``deepspeed.initialize``."""
    import deepspeed

    try:
        with deepspeed.zero.Init(config_dict_or_path=config_of(run, disk)):
            llama(hidden=512)
    except Exception as error:
        return {"error": told(error)}
    return {}


def in_shared_memory() -> list[str]:
    """Return what this process has open or mapped below ``/dev/shm``."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    return mapped + [link for link in _open_files() if link.startswith("/dev/shm/")]


def _open_files() -> list[str]:
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(link.readlink()))
    return links


def _tasks() -> set[str]:
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def gather_and_drop(run: Run, disk: str, method: str | None) -> dict[str, Any]:
    """Make a model on the disk, read it, drop it, and look at what is left while the process goes on.

    A whole engine would not do: DeepSpeed itself keeps engines that nobody refers to any more.
    """
    import deepspeed

    config = config_of(run, disk, {"engine": method} if method else {})
    deepspeed.init_distributed()  # has threads of its own
    before = _tasks()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = llama(hidden=512)
    (swapper,) = swappers(model)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        total = sum(float(parameter.detach().float().sum()) for parameter in model.parameters())
    during, records = _tasks(), len(swapper._records._swap._extents)
    reference = weakref.ref(swapper)
    del swapper, model
    gc.collect()
    return {
        "total": total,
        "records": records,
        "threads of ours": len(during - before),
        "gone": reference() is None,
        "threads left": len(_tasks() - before),
        "open": [link for link in _open_files() if link.startswith(disk)],
        "folders": [path.name for path in Path(disk, "peftds_ext_swap").iterdir()],
    }


def into_foreign_memory(run: Run, disk: str) -> dict[str, Any]:
    """Read a partition into memory of several kinds, by the swapper alone."""
    import deepspeed

    config = config_of(run, disk)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = llama(hidden=512)
    (swapper,) = swappers(model)
    parameter = model.model.layers[0].mlp.up_proj.weight
    with deepspeed.zero.GatheredParameters([parameter]):
        expected = parameter.detach().flatten().clone()
    same = []
    for dtype in (expected.dtype, torch.float32):
        target = torch.empty(expected.numel(), dtype=dtype)
        swapper.swap_into_buffer(parameter, target)
        same.append(torch.equal(target, expected.to(dtype)))
    scattered = torch.empty(2 * expected.numel(), dtype=expected.dtype)[::2]
    swapper.swap_into_buffer(parameter, scattered)
    same.append(torch.equal(scattered, expected))
    # Stands for any device that the storage engine cannot write to.
    swapper.swap_into_buffer(parameter, torch.empty_like(expected, device="meta"))
    return {"same": same, "status": parameter.ds_tensor.status.name}


def two_engines(run: Run, disk: str) -> dict[str, Any]:
    """Train two models by turns whose configurations name one folder."""
    engines = [engine_of(run, disk, seed=seed) for seed in (0, 1)]
    folders = len(list(Path(disk).glob("peftds_ext_swap/rank0-*")))
    losses = [[step(engine, batch) for engine in engines] for batch in tokens(STEPS)]
    return {"losses": list(zip(*losses, strict=True)), "folders": folders, "remains": remains(disk)}


def other_seed(run: Run, disk: str) -> list[float]:
    """Train the second of those models alone."""
    engine = engine_of(run, disk, seed=1)
    return [step(engine, batch) for batch in tokens(STEPS)]


class ManyLayers(nn.Module):
    """Frozen layers of 4 KiB each after one that is trained."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 64)
        self.frozen = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(count))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar loss."""
        for layer in self.frozen:
            x = x + layer(self.first(x)) * 0.01
        result: torch.Tensor = (x**2).mean()
        return result


def many_parameters(run: Run, disk: str, count: int, open_files: int) -> dict[str, Any]:
    """Train with more parameters on the disk than files may be open."""
    from peftds_ext.integrations.deepspeed import param_swapper

    limits.limit_open_files(open_files)
    param_swapper._MIN_SWAPPED_BYTES = 4096
    config = config_of(run, disk, stage3_param_persistence_threshold=0)
    config["aio"] = {"block_size": 4096}
    engine = run.initialize(ManyLayers(count), config)
    losses = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        loss = engine(torch.randn(2, 32, generator=generator).bfloat16())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    (swapper,) = swappers(engine.module)
    return {"losses": losses, "records": len(swapper._records._swap._extents), "remains": remains(disk)}
