# SPDX-License-Identifier: Apache-2.0
"""The record of a run and its trace say what happened."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Any

import pytest
from ds_nvme import batches, lora_on, shape_for_disk, swapper_of, train_step
from ds_runner import Runner
from ds_worker import Run

STEPS, LAYERS = 4, 3
FAULTS = {"PEFTDS_IO_FAULTS": "read:delay=15@1+"}


def recorded(run: Run, device: str, budget: int = 0, trace: bool = False) -> dict[str, Any]:
    import peftds_ext

    place = {"device": device} | ({"nvme_path": str(run.tmp / "disk")} if device == "nvme" else {})
    config = run.config(zero={"offload_param": place})
    config["peftds_ext"] |= {"params": {"host_bytes": budget}}
    if trace:
        config["peftds_ext"]["trace"] = str(run.tmp / "trace.json")
    engine = run.initialize(lora_on(shape_for_disk(num_hidden_layers=LAYERS)), config)
    before = peftds_ext.stats(engine)
    started = time.monotonic()
    for batch in batches(STEPS):
        train_step(engine, batch)
    seconds = time.monotonic() - started
    after = peftds_ext.stats(engine)
    usage = swapper_of(engine).engine.arena.usage() if device == "nvme" else None
    method = swapper_of(engine).engine.method if device == "nvme" else ""
    pipeline = engine.optimizer.parameter_offload.param_coordinator._fetch.pipeline
    engine.destroy()
    return {
        "before": before.model_dump(),
        "text": str(after),
        "after": json.loads(after.model_dump_json()),
        "seconds": seconds,
        "sizes": pipeline.sizes if pipeline else (),
        "method": method,
        "peak": usage.peak_live if usage else 0,
        "trace": (run.tmp / "trace.json").read_text() if trace else None,
    }


def test_before_the_first_step_there_is_nothing_to_tell(runner: Runner) -> None:
    before = runner.one(recorded, device="nvme").result["before"]
    assert before["last_step"] is None
    assert before["steps"] == before["run"]["layers_used"] == 0


def test_the_record_has_the_bytes_the_waits_and_the_uses(runner: Runner) -> None:
    result = runner.one(recorded, device="nvme").result
    last, run = result["after"]["last_step"], result["after"]["run"]
    assert result["after"]["steps"] == STEPS
    on_disk = sum(result["sizes"])
    # Each layer is read for the forward and for the backward pass, but for the one at each turn.
    assert on_disk < last["tiers"]["disk"]["bytes"] < 2 * on_disk + (1 << 16)
    assert 0 < run["seconds"] <= result["seconds"] * 1.5 + 5
    assert last["layers_used"] == last["layers_resident"] + last["layers_ready"] + last["layers_waited_for"]
    assert run["layers_used"] == STEPS * last["layers_used"]
    assert last["read_ahead_hit_rate"] is not None
    assert result["after"]["host_bytes_peak"] >= result["peak"]
    # What io_uring reads into is registered with it; threads read into ordinary memory.
    assert (result["after"]["pinned_bytes"] > 0) == (result["method"] == "io_uring")
    assert result["after"]["python_entries"] >= run["layers_used"]


def test_with_room_for_all_nothing_is_read_after_the_first_step(runner: Runner) -> None:
    last = runner.one(recorded, device="nvme", budget=1 << 30).result["after"]["last_step"]
    assert last["tiers"]["disk"]["bytes"] == 0
    assert last["resident_share"] == 1.0
    assert last["bound_by"] == "compute"


def test_a_slow_disk_is_what_bounds_the_step(runner: Runner) -> None:
    result = runner.one(recorded, device="nvme", env=FAULTS).result
    assert "bound by disk" in result["text"]
    last = result["after"]["last_step"]
    assert last["bound_by"] == "disk"
    assert last["layers_waited_for"] > 0
    assert last["compute_waited_seconds"] > 0.015


def test_in_host_memory_every_use_is_resident(runner: Runner) -> None:
    stats = runner.one(recorded, device="cpu").result["after"]
    assert stats["last_step"]["resident_share"] == 1.0
    assert stats["host_bytes_held"] > 2 * 2 * 512 * 2048


def test_the_trace_has_a_track_per_kind_of_work(runner: Runner) -> None:
    text = runner.one(recorded, device="nvme", trace=True, env=FAULTS).result["trace"]
    events = json.loads(text)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[tracks[event["tid"]]].append(event)
    assert {"layers", "waits", "disk 0"} <= set(spans)
    names = {event["name"] for event in spans["layers"]}
    layer = "module.base_model.model.model.layers.1"
    for name in ("optimizer step", f"forward {layer}", f"backward {layer}"):
        assert any(found.endswith(name.split("module.")[-1]) for found in names), (name, names)
    for track in spans.values():  # apart, or one inside the other
        ends: list[float] = []
        for event in track:
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)
    read = sum(event["args"]["bytes"] for name in spans if name.startswith("disk") for event in spans[name])
    assert read > 0


def without_layers(run: Run) -> str:
    import peftds_ext

    engine = run.initialize(
        lora_on(shape_for_disk()), run.config(stage=2) | {"peftds_ext": {"enabled": True}}
    )
    with pytest.raises(ValueError) as caught:
        peftds_ext.stats(engine)
    return str(caught.value)


def test_an_engine_without_layers_says_so(runner: Runner) -> None:
    assert "streams no layers" in runner.one(without_layers).result
