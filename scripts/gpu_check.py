# SPDX-License-Identifier: Apache-2.0
"""Builds the extension and checks the CUDA operators on this machine's GPU.

Every CUDA operator is compared with the CPU one: the same bits for the Adam step and the cast, 1e-12
relative for the sum of squares. Then the Adam step is timed beside torch's own fused AdamW. Exit
status: 0 all right, 1 a check failed, 2 this machine lacks what is needed (the output says what).

    python scripts/gpu_check.py [--no-build] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 9


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
    return lacks


def build() -> tuple[bool, str]:
    """Compile both modules in place for the GPUs of this machine; return success and the output's end."""
    environment = {**os.environ, "FORCE_CUDA": "1"}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    return result.returncode == 0, (result.stdout + result.stderr)[-4000:]


# ---- time -------------------------------------------------------------------------------------


def median_ms(actions: list[Callable[[], object]]) -> list[float]:
    """Time the actions in turn with CUDA events; return the median of each in milliseconds."""
    times: list[list[float]] = [[] for _ in actions]
    for round_number in range(ROUNDS + 3):
        for action, collected in zip(actions, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # about 1 ms: the action is queued by the time that the clock starts
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


# ---- the whole --------------------------------------------------------------------------------


def run(build_first: bool) -> dict[str, Any]:
    """Build, load, check and measure, printing as it goes; return the report."""
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "checks": [],
    }

    def passes(name: str, passed: bool, detail: str = "") -> bool:
        report["checks"].append({"name": name, "passed": passed, "detail": detail})
        print("ok    " if passed else "FAILED", name, "" if passed else detail, flush=True)
        return passed

    if build_first and not passes("build", *build()):
        return report
    from peftds_ext import _native

    if not passes("the CUDA module loads", *_native.cuda_status()):
        return report
    import gpu_comparisons

    for check in itertools.chain(gpu_comparisons.comparisons("cuda"), gpu_comparisons.cuda_behaviour()):
        passes(*check)
    report["timings"] = measure()
    for name, value in report["timings"].items():
        print(f"{name:32} {value:.4g}")
    return report


def main() -> int:
    """Run all; see the module's docstring for the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--no-build", action="store_true", help="use the modules that are built already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    lacks = missing(build=not arguments.no_build)
    if lacks:
        print("gpu_check cannot run here. Missing:", *lacks, sep="\n  - ")
        report: dict[str, Any] = {"missing": lacks}
        status = 2
    else:
        sys.path.insert(0, str(ROOT))
        report = run(build_first=not arguments.no_build)
        failed = [check["name"] for check in report["checks"] if not check["passed"]]
        print(f"{len(report['checks'])} checks, {len(failed)} failed", *failed, sep="\n  ")
        status = 1 if failed else 0
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
