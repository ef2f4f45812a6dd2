# SPDX-License-Identifier: Apache-2.0
"""Unmodified Trainer and Accelerate programs pick the engine up from ``deepspeed.initialize``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_models import furthest, llama, lora, masters, relative, tokens
from ds_runner import Runner
from ds_worker import Run

STEPS = 4


def _config(run: Run, optimizer: bool) -> dict[str, Any]:
    """Return what people write: "auto" wherever Trainer knows better, and our section."""
    config = run.config(
        "bf16",
        bf16={"enabled": "auto"},
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        zero={"stage3_param_persistence_threshold": "auto"},
        adam_params={"lr": "auto", "weight_decay": "auto"},
    )
    if not optimizer:
        del config["optimizer"]
        if not run.ours:
            config["zero_force_ds_cpu_optimizer"] = False  # so that torch's AdamW stays
    return config


def train(run: Run, optimizer: bool, folder: str, resume: bool = False) -> dict[str, Any]:
    import transformers

    base = Path(folder) / "base"
    if not base.exists():
        llama().bfloat16().save_pretrained(base)
    arguments = transformers.TrainingArguments(
        output_dir=str(Path(folder) / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        logging_steps=1,
        learning_rate=1e-3,
        warmup_steps=2,
        weight_decay=0.01,
        max_grad_norm=0.5,
        bf16=True,
        use_cpu=True,
        report_to=[],
        deepspeed=_config(run, optimizer),
    )
    model = lora(transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16))
    rows = [{"input_ids": row, "labels": row} for row in torch.cat(tokens(2 * STEPS))]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume or None)
    engine = trainer.model_wrapped
    trainer.save_model(str(Path(folder) / "adapter"))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "kinds": (
            type(engine.optimizer).__name__,
            type(engine.optimizer.optimizer).__name__,
            type(getattr(engine.optimizer.optimizer, "ds_opt_adam", None)).__name__,
        ),
        "dtypes": sorted({str(p.dtype) for p in model.parameters() if p.requires_grad}),
        "last": masters(engine),
        **{key: [entry[key] for entry in history] for key in ("loss", "grad_norm", "learning_rate")},
    }


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "no optimizer"])
def test_trainer_with_peft(
    runner: Runner, optimizer: bool, tmp_path: Path, measured: Callable[..., None]
) -> None:
    from safetensors.torch import load_file

    folders = [tmp_path / mode for mode in ("ours", "stock", "resumed")]
    for folder in folders:
        folder.mkdir()
    ours = runner.one(train, "ours", optimizer=optimizer, folder=str(folders[0])).result
    stock = runner.one(train, "stock", optimizer=optimizer, folder=str(folders[1])).result
    measured(
        losses=relative(ours["loss"], stock["loss"]),
        norms=relative(ours["grad_norm"], stock["grad_norm"]),
        last=furthest(ours["last"], stock["last"]),
    )
    assert ours["kinds"] == ("PeftdsZeroOptimizer_Stage3", "DeepSpeedCPUAdam", "KernelCpuAdam")
    assert ours["dtypes"] == stock["dtypes"] == ["torch.float32"]
    assert len(ours["loss"]) == STEPS
    assert relative(ours["loss"], stock["loss"]) <= 1e-4
    # Norms of bf16 gradients, whose unit roundoff is 4e-3.
    assert relative(ours["grad_norm"], stock["grad_norm"]) <= 2e-3
    assert ours["learning_rate"] == stock["learning_rate"]

    adapter = load_file(folders[0] / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == len(ours["last"])
    for name, master in ours["last"].items():
        assert torch.allclose(adapter[name.replace(".default", "")].float(), master, atol=0, rtol=2**-8), name

    resumed = runner.one(train, "ours", optimizer=optimizer, folder=str(folders[0]), resume=True).result
    assert resumed["loss"] == ours["loss"]
    assert furthest(resumed["last"], ours["last"]) == 0.0


def accelerate(run: Run) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    config = run.config("bf16", optimizer=None, zero_force_ds_cpu_optimizer=run.ours)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    model = lora(llama())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loader = torch.utils.data.DataLoader(torch.cat(tokens(4)), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, rates = [], []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        rates.append(model.get_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    inner = model.optimizer.optimizer
    return {
        "losses": losses,
        "rates": rates,
        "last": masters(model),
        "kinds": (type(model.optimizer).__name__, type(getattr(inner, "ds_opt_adam", None)).__name__),
    }


def test_accelerator_prepare(runner: Runner, measured: Callable[..., None]) -> None:
    ours, stock = (o.result for o in runner.pair(accelerate))
    measured(losses=relative(ours["losses"], stock["losses"]), last=furthest(ours["last"], stock["last"]))
    assert ours["kinds"] == ("PeftdsZeroOptimizer_Stage3", "KernelCpuAdam")
    assert ours["rates"] == stock["rates"]
    assert ours["rates"][-1] < ours["rates"][0]
    assert math.isfinite(sum(ours["losses"]))
    assert relative(ours["losses"], stock["losses"]) <= 1e-4
    assert furthest(ours["last"], stock["last"]) <= 1e-6
