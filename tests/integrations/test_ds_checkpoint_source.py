# SPDX-License-Identifier: Apache-2.0
"""Models in place from their checkpoint train as those that are in memory, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_models import masters
from ds_nvme import batches, lora_on, shape_for_disk, swapper_of, train_step
from ds_runner import Runner
from ds_worker import Run

STEPS = 5


def saved(folder: Path, dtype: str = "bf16", shard: str = "1GB", **model: Any) -> Path:
    """Write a checkpoint of a small Llama, and return its folder."""
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    shape_for_disk(**model).to(kind).save_pretrained(folder, max_shard_size=shard)
    return folder


def configured(run: Run, source: str, budget: int, **zero: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(run.tmp / "disk")}
    config = run.config(
        zero={"offload_param": place if source == "checkpoint" else {"device": "cpu"}, **zero}
    )
    if source == "checkpoint":
        config["peftds_ext"]["params"] = {"source": "checkpoint", "host_bytes": budget}
    return config


def built(run: Run, source: str, checkpoint: Path, config: dict[str, Any]) -> Any:
    import transformers

    if source == "checkpoint":
        import peftds_ext

        return peftds_ext.from_pretrained(transformers.AutoModelForCausalLM, checkpoint, config=config)
    from deepspeed import zero

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    zero.Init(module=model, config_dict_or_path=config)  # as Transformers does, under the Trainer
    return model


def counted_gathers() -> list[int]:
    """Let each all-gather of parameters append to the list that is returned."""
    from deepspeed.runtime.zero import partition_parameters

    calls: list[int] = []
    stock = partition_parameters._dist_allgather_fn

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(*args, **kwargs)

    partition_parameters._dist_allgather_fn = counted
    return calls


def train(
    run: Run,
    source: str,
    budget: int = 0,
    checkpointing: bool = False,
    adapter: dict[str, Any] | None = None,
    kind: dict[str, Any] | None = None,
) -> dict[str, Any]:
    import peftds_ext

    checkpoint = saved(run.tmp / "model", **(kind or {}))
    config = configured(run, source, budget)
    base = built(run, source, checkpoint, config)
    whole = lora_on(base, **(adapter or {}))
    if checkpointing:
        whole.enable_input_require_grads()
        whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = run.initialize(whole, config)
    on_disk = sum(str(getattr(p.ds_tensor.final_location, "value", "")) == "nvme" for p in base.parameters())
    result: dict[str, Any] = {
        "on disk": on_disk,
        "files": sorted(path.name for path in run.tmp.iterdir()),
        "copied": {},
    }
    if source == "checkpoint":
        result["copied"] = dict(base.peftds_placement.copied)
        result["in_place"] = len(base.peftds_placement.in_place)
        result["written"] = swapper_of(engine).written_bytes
    gathers = counted_gathers()
    result["losses"] = [train_step(engine, batch) for batch in batches(STEPS, run.rank)]
    result["gathers"] = len(gathers)
    result["masters"] = masters(engine)
    if source == "checkpoint":
        result["written after"] = swapper_of(engine).written_bytes
        usage = swapper_of(engine).engine.arena.usage()
        result["memory"] = usage.peak_live
        pipeline = engine.optimizer.parameter_offload.param_coordinator._fetch.pipeline
        result["read sizes"] = pipeline.read_sizes
        result["uses"] = peftds_ext.stats(engine).run.layers_used
    return result


CASES: dict[str, dict[str, Any]] = {
    "one file": {},
    "shards": {"kind": {"shard": "3MB"}},
    "fp32 file, bf16 model": {"kind": {"dtype": "fp32"}},
    "tied embeddings": {"kind": {"tie_word_embeddings": True}},
    "gradient checkpointing": {"checkpointing": True, "kind": {"dtype": "fp32"}},
    "bf16 adapters": {"adapter": {"fp32_adapters": False}},
    "modules_to_save": {"adapter": {"modules_to_save": ["lm_head"], "fp32_adapters": False}},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_model_in_memory(runner: Runner, case: str) -> None:
    in_memory = runner.one(train, source="memory", **CASES[case]).result
    for budget in (0, 4 << 20):
        streamed = runner.one(train, source="checkpoint", budget=budget, **CASES[case]).result
        assert streamed["losses"] == in_memory["losses"], budget
        assert all(torch.equal(streamed["masters"][n], m) for n, m in in_memory["masters"].items())
        assert streamed["in_place"] == streamed["on disk"] > 0
        assert not streamed["copied"]
        if case != "modules_to_save":  # where a trainable copy of 2 MiB goes to the disk
            assert streamed["written"] == streamed["written after"] == 0
            assert "disk" not in streamed["files"]
        pages = 1 << 16  # round what does not begin at a page
        assert streamed["memory"] <= budget + 2 * max(streamed["read sizes"]) + pages


def test_two_ranks_read_their_parts(runner: Runner) -> None:
    kind = {"intermediate_size": 2051, "vocab_size": 4096, "dtype": "fp32"}
    adapter = {"fp32_adapters": False}  # one dtype, so that there is one buffer to gather
    (in_memory,) = runner.run(train, "ours", world=2, source="memory", kind=kind, adapter=adapter)
    (streamed,) = runner.run(train, "ours", world=2, source="checkpoint", kind=kind, adapter=adapter)
    for ours, theirs in zip(streamed, in_memory, strict=True):
        assert ours.result["losses"] == theirs.result["losses"]
        assert all(torch.equal(ours.result["masters"][n], m) for n, m in theirs.result["masters"].items())
        assert ours.result["in_place"] == ours.result["on disk"] > 0
        assert ours.result["written after"] == 0
        assert 0 < ours.result["gathers"] <= ours.result["uses"]


def fused_experts(run: Run, source: str) -> dict[str, Any]:
    """Train a mixture of experts, whose experts Transformers fuses while it loads them."""
    import transformers

    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape)).bfloat16()
    model.save_pretrained(run.tmp / "model")
    config = configured(run, source, 0)
    base = built(run, source, run.tmp / "model", config)
    engine = run.initialize(lora_on(base, fp32_adapters=False), config)
    result: dict[str, Any] = {"losses": [train_step(engine, batch) for batch in batches(3)]}
    if source == "checkpoint":
        result |= {"in_place": list(base.peftds_placement.in_place)}
        result |= {"copied": dict(base.peftds_placement.copied), "written": swapper_of(engine).written_bytes}
    return result


def test_what_is_made_from_several_tensors_goes_to_the_store(runner: Runner) -> None:
    outcome = runner.one(fused_experts, source="checkpoint")
    streamed = outcome.result
    assert streamed["losses"] == runner.one(fused_experts, source="memory").result["losses"]
    assert "model.embed_tokens.weight" in streamed["in_place"]
    assert len(streamed["copied"]) == 4
    assert all(".experts." in name for name in streamed["copied"])
    assert streamed["written"] == 2 * 2 * 4 * 3 * 256 * 512
    assert outcome.said("4 parameters are copied") == 1


def with_the_trainer(run: Run) -> dict[str, Any]:
    import transformers

    import peftds_ext

    checkpoint = saved(run.tmp / "model")
    config = configured(run, "checkpoint", 0, stage3_gather_16bit_weights_on_model_save=True)
    config |= {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    config["optimizer"]["params"] = {"lr": "auto", "weight_decay": "auto"}
    arguments = transformers.TrainingArguments(
        output_dir=str(run.tmp / "out"),
        per_device_train_batch_size=2,
        max_steps=3,
        save_strategy="no",
        logging_steps=1,
        bf16=True,
        use_cpu=True,
        report_to=[],
        deepspeed=config,
    )
    kind = transformers.AutoModelForCausalLM
    base = peftds_ext.from_pretrained(kind, checkpoint, config=arguments.hf_deepspeed_config)
    model = lora_on(base)
    rows = [{"input_ids": row, "labels": row} for row in torch.cat(batches(3))]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(run.tmp / "adapter"))
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "written": swapper_of(trainer.model_wrapped).written_bytes,
        "saved": (run.tmp / "adapter" / "adapter_model.safetensors").stat().st_size,
        "dtypes": sorted({str(p.dtype) for p in base.parameters() if not p.requires_grad}),
    }


def test_the_trainer_takes_the_model(runner: Runner) -> None:
    result = runner.one(with_the_trainer).result
    assert len(result["losses"]) == 3
    assert all(0 < loss < 20 for loss in result["losses"])
    assert result["written"] == 0
    assert result["saved"] > 0
    assert result["dtypes"] == ["torch.bfloat16"]


def changes_of_weights(run: Run, source: str) -> dict[str, Any]:
    """Overwrite a frozen weight, save and load a checkpoint, merge the adapter, generate."""
    import deepspeed

    checkpoint = saved(run.tmp / "model")
    before = (checkpoint / "model.safetensors").read_bytes()
    config = configured(run, source, 0)
    engine = run.initialize(lora_on(built(run, source, checkpoint, config)), config)
    losses = [train_step(engine, batch) for batch in batches(2)]
    weight = engine.module.base_model.model.lm_head.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.mul_(0.5)
    losses += [train_step(engine, batch) for batch in batches(2)]
    engine.save_checkpoint(str(run.tmp / "saved"))
    losses += [train_step(engine, batch) for batch in batches(2)]
    engine.load_checkpoint(str(run.tmp / "saved"))
    losses += [train_step(engine, batch) for batch in batches(2)]
    engine.eval()
    with torch.no_grad():
        generated = engine.module.generate(input_ids=batches(1)[0][:, :4], max_new_tokens=4, do_sample=False)
    written = swapper_of(engine).written_bytes if source == "checkpoint" else 0
    unchanged = (checkpoint / "model.safetensors").read_bytes() == before
    return {"losses": losses, "generated": generated.tolist(), "written": written, "unchanged": unchanged}


def test_a_weight_that_changes_is_written_once_and_the_file_never(runner: Runner) -> None:
    in_memory = runner.one(changes_of_weights, source="memory").result
    streamed = runner.one(changes_of_weights, source="checkpoint").result
    assert streamed["losses"] == in_memory["losses"]
    assert streamed["generated"] == in_memory["generated"]
    assert streamed["written"] == 2 * 512 * 2048  # the head alone
    assert streamed["unchanged"]


def damaged_in_the_run(run: Run, how: str) -> str:
    checkpoint = saved(run.tmp / "model")
    config = configured(run, "checkpoint", 0)
    engine = run.initialize(lora_on(built(run, "checkpoint", checkpoint, config)), config)
    train_step(engine, batches(1)[0])
    path = checkpoint / "model.safetensors"
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "written":
        with path.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"12345678")
    else:
        path.rename(path.with_suffix(".old"))
        path.write_bytes(b"another")
    try:
        train_step(engine, batches(1)[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(("how", "expected"), [("cut", "CorruptDataError"), ("written", "CorruptDataError")])
def test_a_file_that_changes_in_the_run_is_an_error(runner: Runner, how: str, expected: str) -> None:
    said = runner.one(damaged_in_the_run, how=how).result
    assert said.startswith(f"{expected}: ")
    assert "model.safetensors" in said


def test_a_file_that_is_replaced_stays_the_one_that_was_opened(runner: Runner) -> None:
    assert runner.one(damaged_in_the_run, how="replaced").result == "trained"


def refused(run: Run, change: str) -> str:
    import transformers

    import peftds_ext

    checkpoint = saved(run.tmp / "model")
    config = configured(run, "checkpoint", 0)
    offload = config["zero_optimization"]["offload_param"]
    if change == "off":
        config["peftds_ext"]["enabled"] = False
    elif change == "store":
        config["peftds_ext"]["params"]["source"] = "store"
    elif change == "cpu":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    elif change == "no path":
        del offload["nvme_path"]
    elif change == "cut":
        path = checkpoint / "model.safetensors"
        os.truncate(path, path.stat().st_size - 1000)
    try:
        if change == "not in place":
            run.initialize(lora_on(shape_for_disk()), config)
        else:
            peftds_ext.from_pretrained(transformers.AutoModelForCausalLM, checkpoint, config=config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ("off", "ConfigError", "peftds_ext.enabled"),
        ("store", "ConfigError", "peftds_ext.params.source"),
        ("cpu", "ConfigError", "offload_param.device"),
        ("no path", "ConfigError", "nvme_path"),
        ("not in place", "ConfigError", "peftds_ext.from_pretrained"),
        ("cut", "CheckpointError", "model.safetensors"),
    ],
)
def test_what_excludes_weights_in_place_is_said(runner: Runner, change: str, error: str, named: str) -> None:
    said = runner.one(refused, change=change).result
    assert said.startswith(f"{error}: ")
    assert named in said


def after_the_end(run: Run) -> dict[str, Any]:
    """Fail in the middle of generation and go on, fail to save, change a weight after the engine's end."""
    import deepspeed

    import peftds_ext

    checkpoint = saved(run.tmp / "model", dtype="fp32", num_hidden_layers=4)
    config = configured(run, "checkpoint", 0)
    engine = run.initialize(
        lora_on(built(run, "checkpoint", checkpoint, config), fp32_adapters=False), config
    )
    train_step(engine, batches(1)[0])
    layer = engine.module.base_model.model.model.layers[2]

    def generate() -> None:
        with torch.no_grad():
            engine.module.generate(input_ids=batches(1)[0][:, :4], max_new_tokens=4, do_sample=False)

    def fail(*args: Any) -> None:
        raise RuntimeError("on purpose")

    generate()
    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        generate()
    handle.remove()
    generate()
    coordinator = engine.optimizer.parameter_offload.param_coordinator
    counts = coordinator._fetch.pipeline.executor.counts()
    before = counts.demanded
    generate()
    result = {"demanded": coordinator._fetch.pipeline.executor.counts().demanded - before}
    result["in use"] = list(coordinator._in_forward)
    with pytest.raises(Exception):  # noqa: B017 - whatever torch raises for a folder that is a file
        engine.save_checkpoint(str(checkpoint / "model.safetensors"))
    result["exposed"] = len(swapper_of(engine)._exposed)
    engine.destroy()
    weight = engine.module.base_model.model.lm_head.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters([weight]):
        result["changed"] = bool((weight == 0.5).all())
    base = peftds_ext.from_pretrained(
        type(engine.module.base_model.model), checkpoint, config=config, torch_dtype=torch.float16
    )
    result["dtype"] = str(next(base.parameters()).dtype)
    return result


def test_failures_leave_nothing_behind(runner: Runner) -> None:
    result = runner.one(after_the_end).result
    assert result["in use"] == []
    assert result["demanded"] <= 8  # of 4 x 6 reads: else the order is not foretold any more
    assert result["exposed"] == 0
    assert result["changed"]
    assert result["dtype"] == "torch.float16"
