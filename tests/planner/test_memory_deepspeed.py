# SPDX-License-Identifier: Apache-2.0
"""The arithmetic against what a real DeepSpeed engine holds, and against DeepSpeed's own estimators."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peftds_ext.planner import DType, Place, State, Training, model_states

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="compares with DeepSpeed, which is not installed"
)

WORKER = Path(__file__).with_name("deepspeed_states.py")
RANKS, ELEMENTS, TRAINABLE = 2, 6 * 64 * 64, 3 * 64 * 64

# stage, dtype, gradient dtype, optimizer on the host, parameters on the host
CASES: list[list[Any]] = [
    [0, "bf16", None, False, False],
    [0, "fp32", None, False, False],
    [1, "bf16", None, False, False],
    [1, "bf16", "fp32", False, False],
    [1, "bf16", None, True, False],
    [2, "bf16", None, True, False],
    [2, "bf16", "fp32", True, False],
    [2, "fp32", None, False, False],
    [3, "bf16", None, False, False],
    [3, "bf16", None, True, True],
    [3, "fp32", None, False, False],
]


@pytest.fixture(scope="module")
def held_by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    folder = tmp_path_factory.mktemp("states")
    cases, result = folder / "cases.json", folder / "result.json"
    cases.write_text(json.dumps(CASES))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = subprocess.run(
        [sys.executable, str(WORKER), port, str(cases), str(result)],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    measured: list[dict[str, int]] = json.loads(result.read_text())
    return measured


@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_states_of_a_live_engine(held_by_deepspeed: list[dict[str, int]], index: int) -> None:
    stage, dtype, grad_dtype, optimizer, param = CASES[index]
    training = Training(
        parameters=ELEMENTS,
        trainable=TRAINABLE,
        gpus=RANKS,
        dtype=DType(dtype),
        gradient_dtype=None if grad_dtype is None else DType(grad_dtype),
        optimizer_device=Place.CPU if optimizer else Place.GPU,
        param_device=Place.CPU if param else Place.GPU,
    )
    holdings = model_states(training, stage).holdings
    planned = {state.value: sum(h.rank_bytes for h in holdings if h.state is state) for state in State}
    assert planned == held_by_deepspeed[index]


def test_zero2_estimator_counts_the_fp32_gradient_of_the_step_besides() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    _, theirs = estimate_zero2_model_states_mem_needs(7 * 10**9, 4, cpu_offload=False)
    ours = model_states(Training(7 * 10**9, gpus=4), 2).bytes_at(Place.GPU)
    assert theirs - ours == 7 * 10**9 * 4 // 4


def test_zero2_estimator_agrees_on_the_gpu_under_offload() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    _, theirs = estimate_zero2_model_states_mem_needs(7 * 10**9, 4, cpu_offload=True)
    ours = model_states(Training(7 * 10**9, gpus=4, optimizer_device=Place.CPU), 2).bytes_at(Place.GPU)
    assert theirs == ours


def test_zero3_estimator_agrees_on_the_gpu_when_only_the_optimizer_is_offloaded() -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    _, theirs, largest_layer = estimate_zero3_model_states_mem_needs(
        7 * 10**9, 10**8, num_gpus_per_node=4, cpu_offload=True, cpu_offload_params=False
    )
    ours = model_states(Training(7 * 10**9, gpus=4, optimizer_device=Place.CPU), 3).bytes_at(Place.GPU)
    assert theirs - largest_layer == ours
