# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are stock DeepSpeed's: exact to resume from, and exchangeable both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_models import furthest, llama, lora, masters, moments, relative, tokens, train_tokens
from ds_runner import Runner, compiler_missing
from ds_worker import CPU_ADAM, Run

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())
BEFORE, AFTER = 3, 3


def _engine(run: Run, dtype: str, seed: int) -> Any:
    section = {"fp16": {"enabled": True, "initial_scale_power": 6}} if dtype == "fp16" else {}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 8}}
    config = run.config(dtype, zero={"sub_group_size": 1000}, scheduler=scheduler, **section)
    return run.initialize(lora(llama(seed=0), seed=seed), config)


def train_and_save(run: Run, dtype: str, folder: str) -> dict[str, Any]:
    """Train, save, and train on: what a run that resumes has to repeat."""
    engine = _engine(run, dtype, seed=1)
    batches = tokens(BEFORE + AFTER)
    train_tokens(engine, batches[:BEFORE])
    saved = {"masters": masters(engine), "moments": moments(engine)}
    engine.save_checkpoint(folder, tag="step")
    return {"saved": saved, "resumed": train_tokens(engine, batches[BEFORE:]), "moments": moments(engine)}


def load_and_train(run: Run, dtype: str, folder: str) -> dict[str, Any]:
    """Resume in a model that was initialized differently and has trained."""
    engine = _engine(run, dtype, seed=99)
    batches = tokens(BEFORE + AFTER)
    train_tokens(engine, batches[:1])
    path, _ = engine.load_checkpoint(folder, tag="step")
    if path is None:
        raise AssertionError("nothing was loaded")
    saved = {"masters": masters(engine), "moments": moments(engine)}
    return {"saved": saved, "resumed": train_tokens(engine, batches[BEFORE:]), "moments": moments(engine)}


def _resume(runner: Runner, dtype: str, saver: str, loader: str, folder: Path) -> tuple[Any, Any]:
    options = {"dtype": dtype, "folder": str(folder), "adam": CPU_ADAM}
    first = runner.one(train_and_save, saver, **options)
    return first.result, runner.one(load_and_train, loader, **options).result


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_resume_is_bit_exact(runner: Runner, dtype: str, tmp_path: Path) -> None:
    saved, loaded = _resume(runner, dtype, "ours", "ours", tmp_path)
    for name in ("masters", "moments"):
        assert furthest(loaded["saved"][name], saved["saved"][name]) == 0.0
    assert loaded["resumed"]["losses"] == saved["resumed"]["losses"]
    assert loaded["resumed"]["lr"] == saved["resumed"]["lr"]
    assert furthest(loaded["resumed"]["last"], saved["resumed"]["last"]) == 0.0
    assert furthest(loaded["moments"], saved["moments"]) == 0.0


@needs_compiler
@pytest.mark.parametrize(("saver", "loader"), [("stock", "ours"), ("ours", "stock")])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_checkpoints_are_exchanged_with_stock(
    runner: Runner, dtype: str, saver: str, loader: str, tmp_path: Path
) -> None:
    saved, loaded = _resume(runner, dtype, saver, loader, tmp_path)
    for name in ("masters", "moments"):
        assert furthest(loaded["saved"][name], saved["saved"][name]) == 0.0
    assert loaded["resumed"]["losses"][0] == saved["resumed"]["losses"][0]
    assert relative(loaded["resumed"]["losses"], saved["resumed"]["losses"]) <= 1e-4
    # A lost moment or step count would show in the size of an update, which is up to 1e-3.
    assert furthest(loaded["resumed"]["last"], saved["resumed"]["last"]) <= 1e-6
    assert furthest(loaded["moments"], saved["moments"]) <= 1e-6


def save_all_ways(run: Run, folder: str) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine = _engine(run, "bf16", seed=1)
    train_tokens(engine, tokens(2))
    engine.save_checkpoint(folder, tag="step")
    consolidated = get_fp32_state_dict_from_zero_checkpoint(folder, "step")
    state = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    engine.module.save_pretrained(f"{folder}/adapter", state_dict=state)
    return {"masters": masters(engine), "consolidated": {n: t.clone() for n, t in consolidated.items()}}


def test_weights_leave_through_every_door(runner: Runner, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    result = runner.one(save_all_ways, folder=str(tmp_path)).result
    trained, consolidated = result["masters"], result["consolidated"]
    for name, master in trained.items():
        assert torch.equal(consolidated[name], master), name
    assert len(consolidated) > len(trained)

    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == len(trained)
    for name, master in trained.items():
        assert torch.equal(adapter[name.replace(".default", "")], master.bfloat16()), name
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8


def client_scheduler_after_load(run: Run, folder: str) -> list[float]:
    """Return the learning rates that steps after a load really have: the size of the first Adam step."""
    model = lora(llama())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    engine = run.initialize(model, run.config("fp32", optimizer=None), optimizer=optimizer)
    engine.save_checkpoint(folder, tag="step")
    engine.load_checkpoint(folder, tag="step")
    rates = []
    for batch in tokens(3):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        rates.append(engine.get_lr()[0])
        scheduler.step()
    return rates


def test_clients_own_scheduler_acts_after_a_load(runner: Runner, tmp_path: Path) -> None:
    rates = runner.one(client_scheduler_after_load, folder=str(tmp_path)).result
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4])
