# SPDX-License-Identifier: Apache-2.0
"""Parameters on NVMe: every kind of LoRA run gives the losses of the CPU-offload run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_nvme import (
    LARGE_ADAPTER,
    batches,
    configured,
    lora_on,
    placement,
    result_of,
    shape_for_disk,
    swapper_of,
    train_step,
)
from ds_runner import Runner
from ds_worker import Run
from torch import Tensor

STEPS = 6


def train(
    run: Run,
    device: str,
    model: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    offload: dict[str, Any] | None = None,
    reentrant: bool | None = None,
    between: str = "",
    accumulation: int = 1,
    zero_init: bool = False,
) -> dict[str, Any]:
    """Train as asked for; ``between`` names what happens after every second step."""
    import deepspeed

    config = configured(run, device, run.tmp / "disk", zero or {}, offload or {})
    config["gradient_accumulation_steps"] = accumulation
    if zero_init:  # the adapters stay fp32, as with the Trainer
        with deepspeed.zero.Init(config_dict_or_path=config):
            whole = shape_for_disk(**(model or {}))
    else:
        whole = shape_for_disk(**(model or {}))
    whole = lora_on(whole, **(adapter or {}))
    if reentrant is not None:
        whole.enable_input_require_grads()
        whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    engine = run.initialize(whole, config)
    losses = []
    for number, batch in enumerate(batches(STEPS)):
        losses.append(train_step(engine, batch))
        if between and number % 2:
            losses.extend(BETWEEN[between](engine, batch))
    return result_of(engine, losses)


def evaluate(engine: Any, batch: Tensor) -> list[float]:
    engine.eval()
    with torch.no_grad():
        loss = float(engine(input_ids=batch, labels=batch).loss)
    engine.train()
    return [loss]


def generate(engine: Any, batch: Tensor) -> list[float]:
    engine.eval()
    with torch.no_grad():
        made = engine.module.generate(
            input_ids=batch[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0
        )
    engine.train()
    return [float(token) for token in made.flatten()]


def save_adapter(engine: Any, batch: Tensor) -> list[float]:
    """Gather everything, as a save does, and count what that writes to the disk."""
    import deepspeed

    before = _writes(engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        total = sum(float(parameter.detach().float().sum()) for parameter in engine.module.parameters())
    return [total, float(_writes(engine) - before)]


def _writes(engine: Any) -> int:
    swapper = swapper_of(engine)
    if swapper is None:
        return 0
    counter: Any = swapper._records
    if not hasattr(counter, "writes"):
        counter.writes, write = 0, counter.write

        def counted(key: str, tensor: Tensor) -> None:
            counter.writes += 1
            write(key, tensor)

        counter.write = counted
    return int(counter.writes)


BETWEEN: dict[str, Callable[[Any, Tensor], list[float]]] = {
    "eval": evaluate,
    "generate": generate,
    "save": save_adapter,
}

CASES: dict[str, dict[str, Any]] = {
    "default settings": {},
    "accumulation": {"accumulation": 2},
    "checkpointing": {"reentrant": False},
    "reentrant checkpointing": {"reentrant": True},
    "everything released at once": {"zero": {"stage3_max_reuse_distance": 0}, "reentrant": True},
    "tied embeddings": {"model": {"tie_word_embeddings": True}},
    "modules_to_save": {"adapter": {"modules_to_save": ["lm_head"]}},
    "fp32 adapters on a bf16 base": {"zero_init": True},
    "large fp32 adapters on a bf16 base": {"zero_init": True, "adapter": LARGE_ADAPTER},
    "trainable beyond max_in_cpu": {"adapter": LARGE_ADAPTER, "offload": {"max_in_cpu": 0}},
    "modules_to_save beyond max_in_cpu": {
        "adapter": {"modules_to_save": ["lm_head"]},
        "offload": {"max_in_cpu": 0},
        "zero": {"sub_group_size": 1000, "stage3_max_reuse_distance": 0},
    },
    "eval between steps": {"between": "eval"},
    "generate() between steps": {"between": "generate"},
    "gathering between steps": {"between": "save"},
    "all below the threshold": {"model": {"hidden_size": 64, "intermediate_size": 128}},
    "one larger than any buffer": {"offload": {"buffer_count": 2, "buffer_size": 100_000}},
    "no read-ahead": {"zero": {"stage3_prefetch_bucket_size": 0}},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_cpu_offload(runner: Runner, case: str) -> None:
    on_cpu = runner.one(train, device="cpu", **CASES[case]).result
    on_disk = runner.one(train, device="nvme", **CASES[case]).result
    assert on_disk["losses"] == on_cpu["losses"]
    assert on_disk["masters"].keys() == on_cpu["masters"].keys()
    for name, master in on_disk["masters"].items():
        assert torch.equal(master, on_cpu["masters"][name]), name
    assert on_cpu["placement"]["frozen"] == 0
    assert (on_disk["placement"]["frozen"] > 0) == (case != "all below the threshold")
    assert (on_disk["placement"]["trainable"] > 0) == ("beyond max_in_cpu" in case)
    live, held = on_disk["memory"]
    assert held <= 1.05 * live


def two_engines(run: Run, device: str) -> dict[str, Any]:
    """Train two models of one process in turn, on one path."""
    engines = []
    for seed in range(2):
        whole = lora_on(shape_for_disk(rms_norm_eps=1e-6 * (1 + seed)))
        engines.append(run.initialize(whole, configured(run, device, run.tmp / "disk", {}, {})))
    losses = [[train_step(engine, batch) for engine in engines] for batch in batches(4)]
    paths = {str(swapper_of(engine)._records.path) for engine in engines} if device == "nvme" else set()
    return {"losses": losses, "files": len(paths)}


def test_two_models_of_one_process_share_a_path(runner: Runner) -> None:
    on_cpu = runner.one(two_engines, device="cpu").result
    on_disk = runner.one(two_engines, device="nvme").result
    assert on_disk["losses"] == on_cpu["losses"]
    assert on_disk["files"] == 2


def test_two_processes_share_a_path(runner: Runner, tmp_path: Path) -> None:
    alone = runner.one(train, device="cpu").result
    first, second = runner.run(train, "ours", "ours", device="nvme", tmp=tmp_path)
    assert first[0].result["losses"] == second[0].result["losses"] == alone["losses"]
    assert list((tmp_path / "disk" / "peftds_ext_swap").glob("rank*")) == []


def through_a_checkpoint(
    run: Run, saved_by: str, loaded_by: str, adapter: dict[str, Any], offload: dict[str, Any]
) -> Any:
    """Train, save, and load into an engine whose weights were other ones; train both on."""
    losses = {}
    folder = run.tmp / "checkpoint"
    for role, device in (("saved", saved_by), ("loaded", loaded_by)):
        torch.manual_seed(0)
        whole = lora_on(shape_for_disk(), **adapter)
        if role == "loaded":
            for parameter in whole.parameters():
                parameter.data.mul_(0.5)
        config = configured(run, device, run.tmp / f"disk-{role}", {}, offload if device == "nvme" else {})
        engine = run.initialize(whole, config)
        if role == "saved":
            for batch in batches(3):
                train_step(engine, batch)
            engine.save_checkpoint(str(folder))
        else:
            engine.load_checkpoint(str(folder))
        losses[role] = [train_step(engine, batch) for batch in batches(5)[3:]]
        losses[role] += [train_step(engine, batch) for batch in batches(2)]
    return losses


@pytest.mark.parametrize("trainable", ["in memory", "on the disk"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme")])
def test_checkpoints_go_from_tier_to_tier(
    runner: Runner, saved_by: str, loaded_by: str, trainable: str
) -> None:
    on_disk = trainable == "on the disk"
    losses = runner.one(
        through_a_checkpoint,
        saved_by=saved_by,
        loaded_by=loaded_by,
        adapter=LARGE_ADAPTER if on_disk else {},
        offload={"max_in_cpu": 0} if on_disk else {},
    ).result
    assert losses["loaded"] == losses["saved"]


def saved_after(run: Run, damage: str, checksum: str = "first") -> str:
    """Damage what is on the disk, then save; returns the error's kind, or the sum of a saved weight."""
    import os

    config = configured(run, "nvme", run.tmp / "disk", {}, {})
    config["peftds_ext"]["io"] = {"checksum": checksum}
    engine = run.initialize(lora_on(shape_for_disk()), config)
    if damage != "a flipped bit before the first read":
        train_step(engine, batches(1)[0])
    path = swapper_of(engine)._records.path
    if damage.startswith("a flipped bit"):
        with path.open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)
            file.seek(1000)
            file.write(bytes([byte[0] ^ 64]))
    elif damage == "cut":
        os.truncate(path, 4096)
    elif damage == "removed":
        path.unlink()
    elif damage == "replaced":
        path.rename(path.with_suffix(".old"))
        path.write_bytes(b"\x7f" * path.with_suffix(".old").stat().st_size)
    try:
        engine.save_checkpoint(str(run.tmp / "checkpoint"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    fragments = torch.load(
        next((run.tmp / "checkpoint").glob("*/zero_pp_rank_0_mp_rank_00_model_states.pt")), weights_only=False
    )["frozen_param_fragments"]
    return str(sum(float(value.double().abs().sum()) for value in fragments.values()))


@pytest.mark.parametrize(
    ("damage", "checksum", "expected"),
    [
        ("a flipped bit before the first read", "first", "CorruptDataError"),
        ("a flipped bit", "always", "CorruptDataError"),
        ("cut", "first", "CorruptDataError"),
        ("removed", "first", "as undamaged"),
        ("replaced", "first", "as undamaged"),
    ],
)
def test_a_checkpoint_holds_what_was_written_or_is_refused(
    runner: Runner, damage: str, checksum: str, expected: str
) -> None:
    found = runner.one(saved_after, damage=damage, checksum=checksum).result
    if expected == "as undamaged":
        expected = runner.one(saved_after, damage="none").result
        assert found == expected
    else:
        assert found.startswith(f"{expected}: ")
        assert "data.bin" in found


def loaded_without_optimizer(run: Run, device: str, offload: dict[str, Any]) -> list[float]:
    """Save, change all weights, load the module alone, and train on."""
    whole = lora_on(shape_for_disk(), **LARGE_ADAPTER)
    engine = run.initialize(
        whole, configured(run, device, run.tmp / "disk", {}, offload if device == "nvme" else {})
    )
    train_step(engine, batches(1)[0])
    engine.save_checkpoint(str(run.tmp / "checkpoint"))
    before = [train_step(engine, batch) for batch in batches(2)]
    engine.load_checkpoint(str(run.tmp / "checkpoint"), load_optimizer_states=False)
    return before + [train_step(engine, batch) for batch in batches(2)]


@pytest.mark.parametrize("offload", [{}, {"max_in_cpu": 0}])
def test_a_checkpoint_is_loaded_without_its_optimizer(runner: Runner, offload: dict[str, Any]) -> None:
    on_cpu = runner.one(loaded_without_optimizer, device="cpu", offload=offload).result
    on_disk = runner.one(loaded_without_optimizer, device="nvme", offload=offload).result
    assert on_disk == on_cpu


def engines_one_after_another(run: Run) -> list[int]:
    """Make, use and drop engines; returns how many folders there are after each."""
    import gc

    found = []
    for _ in range(2):
        whole = lora_on(shape_for_disk())
        engine = run.initialize(whole, configured(run, "nvme", run.tmp / "disk", {}, {}))
        train_step(engine, batches(1)[0])
        engine.destroy()
        del engine, whole
        gc.collect()
        found.append(len(list((run.tmp / "disk" / "peftds_ext_swap").glob("rank*"))))
    return found


def test_an_engine_that_is_destroyed_and_dropped_takes_its_folder_along(runner: Runner) -> None:
    assert runner.one(engines_one_after_another).result == [0, 0]


def restored_in_one_buffer(run: Run, device: str) -> list[list[float]]:
    """Train adapters of which some lie on the disk and others in memory, and go back to a checkpoint."""
    offload = {"max_in_cpu": 0} if device == "nvme" else {}
    config = configured(run, device, run.tmp / "disk", {}, offload)
    whole = lora_on(shape_for_disk(), rank_pattern={"q_proj": 1024})
    engine = run.initialize(whole, config)
    if device == "nvme":
        found = placement(engine)
        assert found["trainable"] > 0
        assert found["memory"] > 0
    losses = [[train_step(engine, batch) for batch in batches(2)]]
    engine.save_checkpoint(str(run.tmp / "checkpoint"))
    losses.append([train_step(engine, batch) for batch in batches(4)[2:]])
    engine.load_checkpoint(str(run.tmp / "checkpoint"))
    losses.append([train_step(engine, batch) for batch in batches(4)[2:]])
    return losses


def test_a_checkpoint_restores_what_is_in_memory_beside_what_is_on_the_disk(runner: Runner) -> None:
    on_disk = runner.one(restored_in_one_buffer, device="nvme").result
    assert on_disk[2] == on_disk[1]
    assert on_disk == runner.one(restored_in_one_buffer, device="cpu").result


def told_while_layers_are_streamed(run: Run) -> list[bool]:
    """Train with nothing kept, and tell of each record whether its checksums are published."""
    import json
    import time

    config = configured(run, "nvme", run.tmp / "disk", {}, {})
    config["peftds_ext"]["params"] = {"host_bytes": 0}
    engine = run.initialize(lora_on(shape_for_disk()), config)
    train_step(engine, batches(1)[0])
    time.sleep(1.2)  # longer than the first pause between two publications
    train_step(engine, batches(1)[0])
    manifest = json.loads(next((run.tmp / "disk").rglob("manifest.json")).read_text())
    return [record["crc32c"] is not None for record in manifest["records"]]


def test_checksums_are_published_while_layers_are_streamed(runner: Runner) -> None:
    told = runner.one(told_while_layers_are_streamed).result
    assert told
    assert all(told)
