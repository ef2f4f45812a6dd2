# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a sentence encoder with LoRA under DeepSpeed ZeRO-3, parameters and optimizer on the CPU.

    python examples/lora_minilm.py                    # with peftds_ext
    python examples/lora_minilm.py --engine stock     # the same with plain DeepSpeed
    python examples/lora_minilm.py --offload nvme     # parameters in files
    python examples/lora_minilm.py --offload checkpoint    # read in place from the model's own file
    deepspeed examples/lora_minilm.py                 # one process per GPU

The model, all-MiniLM-L6-v2, and the texts, Python's own help topics, come with installed packages;
nothing is downloaded. The model learns to find the topic that a paragraph was taken from
(``topics_data.py``). What peftds_ext needs is marked with (1) and (2), and with (3) what weights in place
need beside; the rest is an ordinary DeepSpeed and PEFT script.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swap_folder import WatchedFolder, temporary_folder

# Read when the libraries are imported. Threads that spin while they wait would steal the cores that a
# busy machine's other processes, or other ranks, need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from demo_report import AdapterCheck, Figures, InPlace, Progress, print_figures, run_figures
from peft import LoraConfig, PeftModel, get_peft_model
from rich.markup import escape
from sentence_encoder import base_model, embed, model_dir, recall_at_1, tokenize
from startup import RunOptions, add_run_options, join_process_group, parse_values, run_script
from topics_data import Batches, TopicsData, build_dataset, candidate_topics, python_help_topics
from torch.nn import functional
from transformers import AutoTokenizer

SWAP_PARENT = Path("out/nvme")
"""Not the system's folder for temporary files: that is often a RAM disk."""
CANDIDATES = 24
TEMPERATURE = 0.1
CHECKED_PARAGRAPHS = 8
ADAPTER_TOLERANCE = 2.0**-8
"""Largest difference allowed between an embedding of the trained and of the reloaded model.

Both run the same bf16 weights on the same batch, so nothing but the order of sums may differ. The
components of a unit vector are at most 1, and 2**-8 is the unit roundoff of bf16 there (8 significant
bits). An adapter that is lost or partly written shows: the report gives the distance to the base model.
"""


@dataclass(frozen=True)
class Options(RunOptions):
    """The command line."""

    output: Path


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description="LoRA under ZeRO-3 with offload, on a real task.")
    temporary = f"or checkpoint; default: a temporary one in {SWAP_PARENT}"
    places = ("cpu", "nvme", "checkpoint")
    add_run_options(parser, offload="cpu", places=places, nvme_path=temporary, steps=60, batch=32, lr=4e-3)
    output = Path("out/lora_minilm")
    parser.add_argument("--output", type=Path, default=output, help="adapter folder (default: %(default)s)")
    return Options(**parse_values(parser, arguments))


def ds_config(options: Options) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": options.offload_param,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "weight_decay": 0.0}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_max_lr": options.lr,
                "warmup_num_steps": max(2, options.steps // 10),
                "total_num_steps": options.steps + 1,
            },
        },
        "gradient_clipping": 1.0,
    }
    if options.engine == "peftds":
        config["peftds_ext"] = {"enabled": True}  # (2) the section that switches the engine on
    if options.offload == "checkpoint":
        config["peftds_ext"]["params"] = {"source": "checkpoint"}  # (3) and offload_param.device "nvme"
    return config


def start_engine(options: Options) -> Any:
    """Put LoRA on every linear layer and hand the model to DeepSpeed."""
    config = ds_config(options)
    transformers.set_seed(options.seed)  # the same adapter on every rank
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    base = base_model(in_place=config if options.offload == "checkpoint" else None)  # (3)
    # (3) DeepSpeed casts no adapter on a base that is in place, so it must be bf16 from the start.
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    transformers.set_seed(options.seed + engine.global_rank)  # dropout of its own on each rank
    return engine


@torch.no_grad()
def evaluate(engine: Any, tokenizer: Any, data: TopicsData, batch: int = 32) -> float:
    """Return recall@1 of held-out paragraphs among all topics.

    Each rank evaluates all of them: under ZeRO-3 a forward pass is collective, so the ranks must make
    the same number of passes.
    """
    engine.eval()
    queries = sorted(data.held_out, key=lambda pair: len(pair.paragraph))  # little padding
    texts = [*data.cards, *(pair.paragraph for pair in queries)]
    parts = [texts[start : start + batch] for start in range(0, len(texts), batch)]
    vectors = torch.cat([embed(engine, tokenize(tokenizer, part, engine.device)) for part in parts])
    engine.train()
    cards, paragraphs = vectors[: len(data.cards)], vectors[len(data.cards) :]
    return recall_at_1(paragraphs @ cards.T, [pair.topic for pair in queries])


def train(engine: Any, tokenizer: Any, data: TopicsData, options: Options, progress: Progress) -> None:
    """Run the steps: each rank draws from its own share of the paragraphs."""
    rng = random.Random(options.seed + engine.global_rank)
    batches = Batches(data.train[engine.global_rank :: engine.world_size], options.batch, rng)
    for _ in range(options.steps):
        started = time.perf_counter()
        batch = batches.next()
        topics = candidate_topics(batch, len(data.cards), CANDIDATES, rng)
        # One forward pass for both sides: ZeRO-3 fetches each layer once.
        texts = [data.cards[topic] for topic in topics] + [pair.paragraph for pair in batch]
        vectors = embed(engine, tokenize(tokenizer, texts, engine.device))
        cards, paragraphs = vectors[: len(topics)], vectors[len(topics) :]
        expected = torch.tensor([topics.index(pair.topic) for pair in batch], device=vectors.device)
        loss = functional.cross_entropy(paragraphs @ cards.T / TEMPERATURE, expected)  # InfoNCE
        engine.backward(loss)
        engine.step()
        get_accelerator().synchronize()
        progress.step_done(loss.item(), time.perf_counter() - started)


def save_adapter(engine: Any, output: Path) -> None:
    """Write the adapter in PEFT's own format. Called on all ranks: they gather the weights together."""
    trainable = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    with deepspeed.zero.GatheredParameters(trainable):
        engine.module.save_pretrained(
            output, is_main_process=engine.global_rank == 0, save_embedding_layers=False
        )


@torch.no_grad()
def check_adapter(engine: Any, tokenizer: Any, data: TopicsData, output: Path) -> AdapterCheck | None:
    """Load the saved adapter with PEFT alone and compare its embeddings with the engine's (on rank 0)."""
    texts = [pair.paragraph for pair in data.held_out[:CHECKED_PARAGRAPHS]]
    tokens = tokenize(tokenizer, texts, engine.device)
    engine.eval()
    trained = embed(engine, tokens)
    if engine.global_rank != 0:
        return None
    # By default PEFT turns bf16 adapters into fp32; the comparison needs what was trained.
    reloaded = PeftModel.from_pretrained(base_model(), str(output), autocast_adapter_dtype=False)
    reloaded.to(engine.device).eval()
    difference = float((embed(reloaded, tokens) - trained).abs().max())
    with reloaded.disable_adapter():
        from_base = float((embed(reloaded, tokens) - trained).abs().max())
    return AdapterCheck(str(output), difference, ADAPTER_TOLERANCE, from_base)


def run(options: Options) -> int:
    """Train, save and check; return the exit status."""
    started = time.perf_counter()
    model_dir()  # a missing package is told before anything else happens
    if options.engine == "peftds":
        import peftds_ext

        peftds_ext.install()  # (1) before anything of DeepSpeed's is set up
    join_process_group()
    if options.offload != "cpu" and options.nvme_path is None:
        options = replace(options, nvme_path=temporary_folder(SWAP_PARENT))
    folder = WatchedFolder(options.nvme_path) if options.nvme_path else None
    options.output.mkdir(parents=True, exist_ok=True)
    data = build_dataset(python_help_topics(), seed=options.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    engine = start_engine(options)
    in_place = InPlace.of(engine.module.get_base_model()) if options.offload == "checkpoint" else None
    with Progress(options.steps, shown=engine.global_rank == 0) as progress:
        progress.say(
            f"{options.engine}: {len(data.train)} paragraphs of {len(data.names)} topics, "
            f"{len(data.held_out)} held out"
        )
        if in_place:
            progress.say(f"parameters read in place: {in_place} in {escape(str(model_dir()))}")
        before = evaluate(engine, tokenizer, data)
        progress.say(f"recall@1 on held-out paragraphs before training: {before:.3f}")
        written = sum(folder.new().values()) if folder else None
        if folder:
            progress.say(f"written to {escape(str(folder.path))} before the first step: {written:,} bytes")
        train(engine, tokenizer, data, options, progress)
    after = evaluate(engine, tokenizer, data)
    save_adapter(engine, options.output)
    check = check_adapter(engine, tokenizer, data, options.output)
    if check is None:
        return 0
    figures = Figures(
        engine=options.engine,
        offload=options.offload,
        recall_before=before,
        recall_after=after,
        adapter=check,
        in_place=in_place,
        written_bytes=written,
        **run_figures(engine, progress, started),
    )
    print_figures(figures)
    if options.json:
        figures.write(options.json)
    return 0 if check.passed else 1


def main() -> int:
    return run_script(run, parse_options())


if __name__ == "__main__":
    sys.exit(main())
