# SPDX-License-Identifier: Apache-2.0
"""The streaming benchmark, small: every tier is measured, does the same work, and stock's absence is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_bench_miniature import HAS_DEEPSPEED, measured, run, without_compiler

SHAPE = ("--hidden", "512", "--layers", "2", "--vocabulary", "2048", "--tokens", "8")


@pytest.mark.timeout(900)
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_every_tier_is_measured_and_does_the_same_work(tmp_path: Path) -> None:
    process, output = run(
        "bench_stream.py",
        tmp_path,
        *SHAPE,
        "--rounds",
        "2",
        "--warmup-rounds",
        "2",
        environment=without_compiler(tmp_path) | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(output.read_text())
    rows = measured(result)
    assert {"resident (ZeRO-2)", "ours, base in host memory", "stock, base in host memory"} <= rows.keys()
    assert sum(label.startswith("ours, base on the disk") for label in rows) == 4
    assert not any(label.startswith("stock, base on the disk") for label in rows)
    assert "not measured: DeepSpeed's async_io cannot be built" in process.stdout
    (report,) = result["reports"]
    equal = [note for note in report["notes"] if "ours" in note and "bit-equal to" in note]
    assert len(equal) == 7
    assert any(note.startswith("limit") for note in report["notes"])
