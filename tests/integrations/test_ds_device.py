# SPDX-License-Identifier: Apache-2.0
"""Layers copied to a stand-in for a GPU give the losses of a model that is whole in memory, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ds_layers import CASES, LAYERS, configured, on_a_device, train
from ds_models import masters
from ds_nvme import LARGE_ADAPTER, batches, lora_on, shape_for_disk, train_step
from ds_runner import Runner
from ds_worker import Run

import peftds_ext


@pytest.mark.parametrize("case", CASES)
def test_every_tier_and_budget_gives_the_resident_losses(runner: Runner, case: str) -> None:
    resident = runner.one(train, tier="resident", **CASES[case]).result
    runs: list[dict[str, Any]] = [
        {"tier": "cpu", "device": "lazy", "device_budget": 0},
        {"tier": "nvme", "device": "behind", "budget": 0, "device_budget": 3 << 20},
    ]
    if case in ("plain", "checkpointing"):
        runs += [
            {"tier": "cpu", "device": "eager"},
            {"tier": "nvme", "device": "lazy", "budget": 6 << 20, "device_budget": 0},
        ]
    for settings in runs:
        streamed = runner.one(train, **settings, **CASES[case]).result
        assert streamed["losses"] == resident["losses"], settings
        assert all(torch.equal(streamed["masters"][n], m) for n, m in resident["masters"].items())
        if CASES[case].get("kind") == "view":
            continue
        if settings.get("device_budget") is not None:
            largest = max(streamed["device sizes"])
            assert streamed["device peak"] <= 2 * largest + settings["device_budget"], settings
        if settings["tier"] == "nvme":
            assert streamed["memory"][0] <= 2 * max(streamed["sizes"]) + settings["budget"], settings
        else:
            assert streamed["counts"]["waits"] == 0


def changed_by_hand(
    run: Run, tier: str, device: str = "", budget: int = 0, device_budget: int = 0
) -> dict[str, Any]:
    """Change frozen weights between steps, before a backward pass, and by loading a checkpoint."""
    import deepspeed

    if device:
        on_a_device(device)
    config = configured(run, tier, budget)
    config["peftds_ext"].setdefault("params", {})["device_bytes"] = device_budget
    whole = lora_on(shape_for_disk(num_hidden_layers=LAYERS))
    engine = run.initialize(whole, config)
    layers = whole.base_model.model.model.layers
    losses = []

    def scale(layer: int, factor: float) -> None:
        weight = layers[layer].mlp.up_proj.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.mul_(factor)

    for number, batch in enumerate(batches(5)):
        scale(number % LAYERS, 1.5)
        loss = engine(input_ids=batch, labels=batch).loss
        scale(LAYERS - 1, 0.75)  # has been copied ahead for the backward pass by now
        scale(0, 1.25)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        if number == 1:
            engine.save_checkpoint(str(run.tmp / "checkpoint"))
        if number == 3:
            engine.load_checkpoint(str(run.tmp / "checkpoint"))
    saved = sum(path.stat().st_size for path in (run.tmp / "checkpoint").rglob("*.pt"))
    return {"losses": losses, "masters": masters(engine), "saved": saved}


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_a_frozen_weight_that_changes_is_copied_anew(runner: Runner, budget: int) -> None:
    in_memory = runner.one(changed_by_hand, tier="cpu").result
    for tier, device in (("cpu", "eager"), ("nvme", "lazy")):
        budgets = {"budget": (1 << 30) - budget, "device_budget": budget}  # kept in one of the two places
        ours = runner.one(changed_by_hand, tier=tier, device=device, **budgets).result
        assert ours["losses"] == in_memory["losses"], (tier, device)
        assert ours["saved"] == pytest.approx(
            in_memory["saved"], rel=0.01
        )  # no copy is saved beside its weight
        assert all(torch.equal(ours["masters"][n], m) for n, m in in_memory["masters"].items())


def handled_roughly(run: Run, tier: str, device: str = "") -> dict[str, Any]:
    """Infer before training, look at single weights, load by hand, destroy the engine and change weights."""
    import deepspeed

    stand_in = on_a_device(device) if device else None
    config = configured(run, tier, 0)
    config["peftds_ext"].setdefault("params", {})["device_bytes"] = 1 << 30
    whole = lora_on(shape_for_disk(num_hidden_layers=LAYERS))
    engine = run.initialize(whole, config)
    mlp = whole.base_model.model.model.layers[1].mlp
    frozen = [mlp.up_proj.weight, mlp.down_proj.weight, mlp.gate_proj.weight]
    results = []

    def evaluate() -> None:
        engine.eval()
        results.append(float(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss))
        engine.train()

    def total(factor: float = 1.0) -> float:
        with deepspeed.zero.GatheredParameters(frozen, modifier_rank=0 if factor != 1 else None):
            for weight in frozen:
                weight.data.mul_(factor)
            return float(sum(weight.detach().double().sum() for weight in frozen))

    with torch.inference_mode():
        evaluate()
    for batch, weight in zip(batches(3), frozen, strict=True):
        results.append(train_step(engine, batch))
        with deepspeed.zero.GatheredParameters([weight]):
            results.append(float(weight.detach().double().sum()))
        with torch.inference_mode():
            evaluate()
    engine.save_checkpoint(str(run.tmp / "checkpoint"), tag="a")
    results.append(total(1.5))
    with torch.no_grad():
        evaluate()
    if tier == "cpu":  # on the disk a load by hand finds no partitions
        file = next((run.tmp / "checkpoint" / "a").glob("zero_pp_rank_0*model_states.pt"))
        saved = torch.load(file, weights_only=False)["frozen_param_fragments"]
        halved = {name: fragment / 2 for name, fragment in saved.items()}
        engine.load_module_state_dict({"module": {}, "frozen_param_fragments": halved}, strict=False)
        results.append(train_step(engine, batches(1)[0]))
    frozen[0].is_external_param = True
    with torch.no_grad():
        evaluate()
    engine.load_checkpoint(str(run.tmp / "checkpoint"), tag="a")
    results.append(train_step(engine, batches(1)[0]))
    found = {"results": results, "masters": masters(engine)}
    if stand_in is not None:
        uploads = engine.optimizer.parameter_offload.param_coordinator._fetch.uploads
        found |= {"peak": stand_in.peak, "whole": sum(uploads.sizes)}
    engine.destroy()
    results += [total(2.0), total()]
    return {**found, "left": stand_in.live if stand_in is not None else 0}


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_rough_handling_gives_what_it_gives_in_memory(runner: Runner, tier: str) -> None:
    in_memory = runner.one(handled_roughly, tier=tier).result
    for device in ("eager", "behind"):
        ours = runner.one(handled_roughly, tier=tier, device=device).result
        assert ours["results"] == in_memory["results"], device
        assert all(torch.equal(ours["masters"][n], m) for n, m in in_memory["masters"].items())
        assert ours["peak"] <= ours["whole"]  # nothing is there twice
        assert ours["left"] == 0


def late(run: Run, device: str) -> dict[str, Any]:
    """Train large adapters, also on the disk, with steps that overlap the next forward."""
    if device:
        on_a_device(device)
    config = configured(run, "nvme", 0)
    place = {"device": "nvme", "nvme_path": str(run.tmp / "states")}
    config["zero_optimization"] |= {"offload_optimizer": place, "stage3_param_persistence_threshold": 0}
    config["peftds_ext"] |= {"optimizer": {"overlap": True}}
    engine = run.initialize(lora_on(shape_for_disk(num_hidden_layers=LAYERS), **LARGE_ADAPTER), config)
    losses = [train_step(engine, batch) for batch in batches(4)]
    engine.eval()
    with torch.no_grad():
        losses.append(float(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss))
    return {"losses": losses, "masters": masters(engine)}


def test_steps_may_overlap_the_next_forward(runner: Runner) -> None:
    in_memory = runner.one(late, device="")
    for device in ("lazy", "eager"):
        ours = runner.one(late, device=device)
        assert ours.said("steps overlap the next forward") == 1
        assert ours.result["losses"] == in_memory.result["losses"]
        assert all(torch.equal(ours.result["masters"][n], m) for n, m in in_memory.result["masters"].items())


def test_with_room_on_the_device_nothing_is_copied_after_the_first_step(runner: Runner) -> None:
    for tier in ("cpu", "nvme"):
        stats = runner.one(train, tier=tier, device="lazy", device_budget=1 << 30).result["stats"]
        assert stats["last_step"]["tiers"]["copies"]["bytes"] == 0
        assert stats["last_step"]["resident_share"] == 1.0


def test_host_memory_is_page_locked_in_its_exact_size(runner: Runner) -> None:
    result = runner.one(train, tier="cpu", device="eager").result
    live, held, locked = result["host"]
    assert locked == held == live
    assert locked <= 1.05 * result["stats"]["host_bytes_held"]
    assert result["stats"]["pinned_bytes"] >= locked > 0


def test_memory_that_cannot_be_locked_is_used_and_told_of(runner: Runner) -> None:
    outcome = runner.one(low_limit, device="eager")
    assert outcome.said("is not page-locked") == 1
    assert outcome.said("ulimit -l") == 1
    assert outcome.result == runner.one(low_limit, device="").result


def low_limit(run: Run, device: str) -> list[float]:
    import os
    import resource

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
    user = os.geteuid()
    if user == 0:  # whose memory is not limited
        os.seteuid(65534)
    losses: list[float] = train(run, tier="cpu", device=device)["losses"]
    os.seteuid(user)
    return losses


class Profiler:
    """Keeps the ranges that it is shown."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.closed: list[str] = []

    def range_start(self, msg: str) -> int:
        self.open[id(msg)] = msg
        return id(msg)

    def range_end(self, range_id: int) -> None:
        self.closed.append(self.open.pop(range_id))


def recorded(run: Run) -> dict[str, Any]:
    from peftds_ext.integrations.deepspeed import accelerator

    on_a_device("eager")
    profiler = Profiler()
    accelerator.profiler_ranges = lambda: profiler
    config = configured(run, "nvme", 0)
    config["peftds_ext"]["trace"] = str(run.tmp / "trace.json")
    config["peftds_ext"]["params"]["device_bytes"] = 0
    engine = run.initialize(lora_on(shape_for_disk(num_hidden_layers=LAYERS)), config)
    for batch in batches(3):
        train_step(engine, batch)
    stats = peftds_ext.stats(engine)
    sizes = engine.optimizer.parameter_offload.param_coordinator._fetch.uploads.sizes
    engine.destroy()
    return {
        "stats": stats.model_dump(),
        "text": str(stats),
        "trace": json.loads((run.tmp / "trace.json").read_text()),
        "ranges": profiler.closed,
        "sizes": sizes,
    }


def test_the_record_the_trace_and_a_profiler_show_what_was_copied(runner: Runner) -> None:
    result = runner.one(recorded).result
    last = result["stats"]["last_step"]
    copied = last["tiers"]["copies"]["bytes"]
    assert sum(result["sizes"]) < copied < 2 * sum(result["sizes"])
    assert last["tiers"]["disk"]["bytes"] > 0
    assert "copies: " in result["text"]
    tracks = {e["tid"]: e["args"]["name"] for e in result["trace"] if e["name"] == "thread_name"}
    spans = [(tracks[e["tid"]], e) for e in result["trace"] if e["ph"] == "X"]
    assert {"layers", "copies", "device waits", "disk 0"} <= {track for track, _ in spans}
    in_trace = sum(event["args"]["bytes"] for track, event in spans if track == "copies")
    assert in_trace == result["stats"]["run"]["tiers"]["copies"]["bytes"]
    layer = "base_model.model.model.layers.1"
    for how in ("forward", "backward"):
        assert sum(name.startswith(how) and name.endswith(layer) for name in result["ranges"]) == 3


def broken_disk(run: Run) -> list[Any]:
    """A read fails once, ahead of its use; the step is made again."""
    on_a_device("eager")
    config = configured(run, "nvme", 0)
    config["peftds_ext"]["params"]["device_bytes"] = 0
    engine = run.initialize(lora_on(shape_for_disk(num_hidden_layers=LAYERS)), config)
    results: list[Any] = []
    for batch in batches(4):
        try:
            results.append(train_step(engine, batch))
        except peftds_ext.errors.StorageError as error:
            results.append(str(error))
            results.append(train_step(engine, batch))
    return results


def test_a_read_that_fails_ahead_is_told_where_the_layer_is_needed(runner: Runner) -> None:
    good = runner.one(broken_disk).result
    assert all(isinstance(loss, float) for loss in good)
    bad = runner.one(broken_disk, env={"PEFTDS_IO_FAULTS": "read:eio@40"}).result
    told = [result for result in bad if isinstance(result, str)]
    assert len(told) == 1
    assert "data.bin" in told[0]
    assert [result for result in bad if result not in told] == good


def changed_on_the_disk(run: Run) -> str:
    """Somebody writes into the file of a running process."""
    on_a_device("eager")
    config = configured(run, "nvme", 0)
    config["peftds_ext"]["params"]["device_bytes"] = 0
    config["peftds_ext"]["io"] = {"checksum": "always"}
    engine = run.initialize(lora_on(shape_for_disk(num_hidden_layers=LAYERS)), config)
    train_step(engine, batches(1)[0])
    (path,) = (run.tmp / "disk").glob("peftds_ext_swap/*/data.bin")
    with path.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"?" * 4096)
    with pytest.raises(peftds_ext.errors.CorruptDataError) as caught:
        train_step(engine, batches(1)[0])
    return str(caught.value)


def test_what_is_read_is_compared_with_its_checksum(runner: Runner) -> None:
    assert "data.bin" in runner.one(changed_on_the_disk).result
