# SPDX-License-Identifier: Apache-2.0
"""Builds the extension and checks it on this machine's GPU: its CUDA operators, and layers that stream to it.

    python scripts/gpu_check.py [--only PART ...] [--no-build] [--json FILE] [--folder FOLDER]
    python scripts/gpu_check.py --rehearse

Parts, in their order; without ``--only`` all of them, in eight minutes at most:

build       both compiled modules, in place.
operators   every CUDA operator against the CPU one: the same bits for the Adam step and the cast, 1e-12
            relative for the sum of squares. Then the Adam step is timed beside torch's own fused AdamW.
streaming   layers that are copied to the GPU ahead of their use, without DeepSpeed: the bits of a model that
            is whole there, for all budgets; waits; memory (gpu_streaming.py). Then rates: copies against one
            large copy, steps against resident ones (gpu_streaming_rates.py).
deepspeed   ZeRO-3 with LoRA on one GPU, if DeepSpeed is installed: the same bits on every tier, and step
            times beside stock DeepSpeed's (gpu_deepspeed.py).

Each part runs in processes of its own with a time limit, so that one that crashes or hangs is a failed check
and the next one still runs; an exception is a failed check as well. Sizes follow the memory that is free.
Files are written to ``--folder`` (the system's folder for temporary files), and removed: give one on the disk
that layers are to stream from.

``--rehearse`` tries the streaming part (with ``--only deepspeed``, that one) without a GPU: on the CPU, with
a stand-in for the GPU's copies, at tiny sizes. Times are taken and not judged.

Exit status: 0 all right, 1 a check failed, 2 this machine lacks what is needed (the output says what).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's repeatable kernels ask for it

import torch
from gpu_checking import Check, guarded, said

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 9
MINUTES = 8
PARTS = ("build", "operators", "streaming", "deepspeed")
STAGES = {"operators": ("operators",), "streaming": ("streaming", "rates"), "deepspeed": ("deepspeed",)}
"""By part, what runs in a process of its own."""
LIMITS = {"build": 240.0, "operators": 120.0, "streaming": 90.0, "rates": 150.0, "deepspeed": 240.0}
"""Seconds; all of them together take less."""
NEEDED = ("numpy", "pydantic", "psutil", "safetensors")

Report = dict[str, Any]


# ---- what is needed ---------------------------------------------------------------------------


def missing(build: bool) -> list[str]:
    """Return what this machine lacks, each with the remedy."""
    lacks = []
    if torch.version.cuda is None:
        lacks.append(f"a CUDA build of torch: {torch.__version__} is CPU only; install one from pytorch.org")
    elif not torch.cuda.is_available():
        lacks.append("a GPU: torch sees no CUDA device; check nvidia-smi and CUDA_VISIBLE_DEVICES")
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    found = shutil.which("nvcc") or any((Path(home) / "bin/nvcc").exists() for home in homes if home)
    if build and not found:
        lacks.append("nvcc: put the CUDA toolkit's bin folder on the PATH, or set CUDA_HOME")
    packages = [*NEEDED, *(["pybind11", "setuptools", "ninja"] if build else [])]
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        lacks.append(f"Python packages: pip install {' '.join(absent)}")
    return lacks


# ---- processes --------------------------------------------------------------------------------


def supervised(command: list[str], limit: float, **options: Any) -> tuple[int | None, str]:
    """Run a command, and end it and its children after ``limit`` seconds.

    Returns the exit status, or None if it did not end in time, and its output if that is captured.
    """
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output or ""
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def build(limit: float) -> tuple[bool, str]:
    """Compile both modules in place for the GPUs of this machine; return success and the output's end."""
    with tempfile.TemporaryFile("w+") as log:  # not a pipe: what was said before a timeout is told as well
        status, _ = supervised(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            limit,
            cwd=ROOT,
            env={**os.environ, "FORCE_CUDA": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.seek(0)
        output = log.read()[-4000:]
    if status == 0:
        return True, ""
    return False, output if status is not None else f"did not end in {limit:.0f} s: {output}"


# ---- time -------------------------------------------------------------------------------------


def median_ms(actions: list[Callable[[], object]]) -> list[float]:
    """Time the actions in turn with CUDA events; return the median of each in milliseconds."""
    times: list[list[float]] = [[] for _ in actions]
    for round_number in range(ROUNDS + 3):
        for action, collected in zip(actions, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            # About 1 ms: the action is queued by the time that the clock starts.
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            start.record()
            action()
            end.record()
            end.synchronize()
            if round_number >= 3:  # the first are warm-up
                collected.append(start.elapsed_time(end))
    return [statistics.median(collected) for collected in times]


def measure() -> dict[str, float]:
    """Adam beside torch's fused AdamW on the same arrays, and the other operators alone."""
    from peftds_ext import ops

    size = min(100_000_000, torch.cuda.mem_get_info()[0] // 64)
    param, grad = (torch.randn(size, device="cuda") for _ in range(2))
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    half = torch.empty(size, dtype=torch.bfloat16, device="cuda")
    theirs = torch.nn.Parameter(param.clone())
    theirs.grad = grad
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1, fused=True)
    settings: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    ours_ms, theirs_ms, norm_ms, cast_ms = median_ms(
        [
            lambda: ops.adamw_step_(param, grad, exp_avg, exp_avg_sq, step=3, **settings),
            optimizer.step,
            lambda: ops.squared_norm(grad),
            lambda: ops.cast_into(param, half),
        ]
    )
    rate = size / 1e6  # GB/s of one byte per element in one millisecond
    return {
        "elements": size,
        "adamw_ms": ours_ms,
        "adamw_gb_per_s": 28 * rate / ours_ms,
        "torch_fused_adamw_ms": theirs_ms,
        "torch_fused_adamw_gb_per_s": 28 * rate / theirs_ms,
        "speed_ratio_to_torch": theirs_ms / ours_ms,
        "squared_norm_gb_per_s": 4 * rate / norm_ms,
        "cast_fp32_to_bf16_gb_per_s": 6 * rate / cast_ms,
    }


# ---- stages -----------------------------------------------------------------------------------


def stage_checks(stage: str, folder: Path, rehearse: bool, timings: Report) -> Iterator[Check]:
    """Run a stage in this process: yield its checks, and put what it measures into ``timings``."""
    if stage == "operators":
        yield from guarded(stage, lambda: _operators(timings))
    elif stage == "deepspeed":
        import gpu_deepspeed

        yield from guarded(stage, lambda: gpu_deepspeed.checks(folder, rehearse, timings))
    else:
        yield from guarded(stage, lambda: _streaming(stage, folder, rehearse, timings))


def _operators(timings: Report) -> Iterator[Check]:
    import gpu_comparisons

    from peftds_ext import _native

    loaded, reason = _native.cuda_status()
    yield Check("the CUDA module loads", loaded, reason)
    if not loaded:
        return
    timings["device"] = torch.cuda.get_device_name()
    yield from itertools.chain(gpu_comparisons.comparisons("cuda"), gpu_comparisons.cuda_behaviour())
    timings |= measure()
    for name, value in timings.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")


def _streaming(stage: str, folder: Path, rehearse: bool, timings: Report) -> Iterator[Check]:
    import gpu_streaming
    import gpu_streaming_rates
    from gpu_place import Gpu, Place, StandIn

    place: Place
    small, large = gpu_streaming.REHEARSED, gpu_streaming_rates.REHEARSED
    if rehearse:
        from lazy_device import LazyDevice

        torch.set_num_threads(1)  # models are so small that threads would only wait for each other
        place = StandIn(LazyDevice)
    else:
        import psutil  # type: ignore[import-untyped]

        timings["device"] = torch.cuda.get_device_name()
        place, small = Gpu(), gpu_streaming.SMALL
        large = gpu_streaming_rates.fitting(
            torch.cuda.mem_get_info()[0], psutil.virtual_memory().available, shutil.disk_usage(folder).free
        )
    if stage == "streaming":
        yield from gpu_streaming.checks(place, small, folder)
    else:
        yield from gpu_streaming_rates.rates(place, large, folder, timings)


def run_stage(stage: str, folder: Path, records: Path) -> None:
    """Run a stage in this process; write each check, and what was measured up to it, to a file."""
    timings: Report = {}
    with records.open("w") as file:
        for check in stage_checks(stage, folder, False, timings):
            print(json.dumps({"check": said(check)._asdict(), "timings": timings}), file=file, flush=True)
        print(json.dumps({"timings": timings}), file=file, flush=True)


def checked_apart(
    command: list[str], stage: str, limit: float, records: Path
) -> tuple[list[Check], dict[str, Any]]:
    """Run a stage in a process of its own; return what it recorded, and a failed check if it ended badly."""
    status, _ = supervised(command, limit)
    found: list[Check] = []
    timings: Report = {}
    lines = records.read_text().splitlines() if records.exists() else []
    for record in map(json.loads, (line for line in lines if line.endswith("}"))):
        timings = record["timings"]
        if "check" in record:
            found.append(Check(**record["check"]))
    if status != 0:
        after = f", after the check {found[-1].name!r}" if found else ""
        how = f"ended with status {status}" if status is not None else f"did not end in {limit:.0f} s"
        found.append(said(Check(stage, False, how + after)))
    return found, timings


# ---- the whole --------------------------------------------------------------------------------


def run(parts: Iterable[str], folder: Path) -> Report:
    """Build, check and measure, printing as it goes; return the report."""
    until = time.monotonic() + 60 * MINUTES
    report: Report = {"torch": torch.__version__, "checks": [], "timings": {}}

    def add(check: Check) -> bool:
        report["checks"].append(check._asdict())
        return check.passed

    parts = list(parts)
    if "build" in parts and not add(said(Check("build", *build(LIMITS["build"])))):
        return report
    for stage in (stage for part in parts for stage in STAGES.get(part, ())):
        limit = min(LIMITS[stage], until - time.monotonic())
        if limit < 5:
            add(said(Check(stage, False, f"not run: the {MINUTES} minutes are over")))
            continue
        records = folder / f"{stage}.jsonl"
        command = [sys.executable, str(Path(__file__).resolve()), "--stage", stage, "--folder", str(folder)]
        began = time.monotonic()
        checks, timings = checked_apart(command, stage, limit, records)
        report["timings"][stage] = {**timings, "stage_s": time.monotonic() - began}
        for check in checks:
            add(check)
    return report


def rehearse(parts: Iterable[str], folder: Path) -> Report:
    """Try parts without a GPU, in this process; return the report."""
    report: Report = {"checks": [], "timings": {}}
    for stage in (stage for part in parts for stage in STAGES.get(part, ())):
        timings = report["timings"].setdefault(stage, {})
        for check in stage_checks(stage, folder, True, timings):
            report["checks"].append(said(check)._asdict())
    return report


def main(given: Sequence[str] | None = None) -> int:
    """Run all; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", choices=PARTS, help="run this part; may be repeated")
    parser.add_argument("--no-build", action="store_true", help="use the modules that are built already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--folder", type=Path, help="where files are written meanwhile")
    parser.add_argument("--rehearse", action="store_true", help="try it without a GPU, at tiny sizes")
    parser.add_argument("--stage", choices=[*itertools.chain(*STAGES.values())], help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "stream")]
    if arguments.stage:
        run_stage(arguments.stage, arguments.folder, arguments.folder / f"{arguments.stage}.jsonl")
        return 0
    parts = arguments.only or (["streaming"] if arguments.rehearse else list(PARTS))
    parts = [part for part in PARTS if part in parts and not (part == "build" and arguments.no_build)]
    lacks = [] if arguments.rehearse else missing(build="build" in parts)
    if lacks:
        print("gpu_check cannot run here. Missing:", *lacks, sep="\n  - ")
        report: Report = {"missing": lacks}
        status = 2
    else:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            report = (rehearse if arguments.rehearse else run)(parts, Path(folder))
        failed = [check["name"] for check in report["checks"] if not check["passed"]]
        print(f"{len(report['checks'])} checks, {len(failed)} failed", *failed, sep="\n  ")
        status = 1 if failed else 0
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
