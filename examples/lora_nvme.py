# SPDX-License-Identifier: Apache-2.0
"""Train LoRA on a Llama of any size whose frozen weights lie in files, on NVMe or on a plain disk.

    python examples/lora_nvme.py --nvme-path /local_nvme                     # with peftds_ext
    python examples/lora_nvme.py --nvme-path /local_nvme --engine stock      # the same with plain DeepSpeed
    python examples/lora_nvme.py --offload cpu                               # the same losses, from memory
    deepspeed examples/lora_nvme.py --nvme-path /local_nvme                  # one process per GPU

The weights are random and the text is that of Python's own help topics, so nothing is downloaded and any
shape can be tried. What peftds_ext needs is marked with (1) and (2). (3) marks what keeps the whole model
from being in memory while it is made: transformers hands each weight to DeepSpeed at once. All else of
DeepSpeed's settings is left at its default; with those, the stock engine ends with "Not enough buffers",
since it wants to keep all parameters of so small a model at hand and has buffers for five.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swap_folder import WatchedFolder

# Read when the libraries are imported; see lora_minilm.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from demo_report import Progress, RunFigures, print_tables, run_figures, run_rows
from peft import LoraConfig, get_peft_model
from rich.markup import escape
from startup import RunOptions, add_run_options, join_process_group, parse_values, positive, run_script
from topics_data import python_help_topics
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig
from words_data import Windows, word_ids

HEAD_WIDTH = 64
MIN_MLP_WIDTH = 2048
"""DeepSpeed leaves a parameter in memory if a rank's part of it is below 1 MiB. With this width
three matrices of each layer reach that in bf16 at hidden 256 on one rank."""


@dataclass(frozen=True)
class Options(RunOptions):
    """The command line."""

    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    checkpointing: bool
    max_in_cpu: int | None


@dataclass(frozen=True)
class Figures(RunFigures):
    """All that the script reports: what every script does, the folder, and the process's memory."""

    folder_bytes: int
    peak_rss_bytes: int


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description="LoRA on a Llama shape, frozen weights on NVMe or a disk.")
    add_run_options(parser, offload="nvme", nvme_path="required with it", steps=20, batch=4, lr=1e-2)
    shape = parser.add_argument_group("shape")
    shape.add_argument("--hidden", type=width, default=256, help="a multiple of 64 (default: %(default)s)")
    shape.add_argument("--layers", type=positive, default=4, help="decoder layers (default: %(default)s)")
    shape.add_argument("--vocabulary", type=positive, default=8192, help="token ids (default: %(default)s)")
    shape.add_argument("--tokens", type=sequence, default=128, help="of a text (default: %(default)s)")
    memory = parser.add_argument_group("memory")
    memory.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    memory.add_argument(
        "--max-in-cpu", type=elements, metavar="ELEMENTS", help="DeepSpeed's key of this name"
    )
    options = Options(**parse_values(parser, arguments))
    if options.offload == "nvme" and options.nvme_path is None:
        parser.error("--nvme-path PATH is missing: name a folder on the drive, or use --offload cpu")
    if options.max_in_cpu is not None and options.offload != "nvme":
        parser.error("--max-in-cpu goes with --offload nvme alone")
    return options


def width(text: str) -> int:
    if (value := positive(text)) % HEAD_WIDTH:
        raise argparse.ArgumentTypeError(f"{value} is not a multiple of {HEAD_WIDTH}, the width of a head")
    return value


def sequence(text: str) -> int:
    if (value := positive(text)) < 2:
        raise argparse.ArgumentTypeError("a text of one token leaves no next token to predict")
    return value


def elements(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def ds_config(options: Options) -> dict[str, Any]:
    place = dict(options.offload_param)
    if options.max_in_cpu is not None:
        place["max_in_cpu"] = options.max_in_cpu
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": place}
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "weight_decay": 0.0}},
        "train_micro_batch_size_per_gpu": options.batch,
    }
    if options.engine == "peftds":
        config["peftds_ext"] = {"enabled": True}  # (2) the section that switches the engine on
    return config


def llama_config(options: Options) -> LlamaConfig:
    """Return Llama's proportions: heads of 64 and an MLP of 8/3 the width (at least ``MIN_MLP_WIDTH``)."""
    heads = options.hidden // HEAD_WIDTH
    return LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=max(MIN_MLP_WIDTH, -(-options.hidden * 8 // (3 * 256)) * 256),
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.tokens,
        use_cache=False,
    )


def start_engine(options: Options) -> Any:
    """Make the frozen base where it shall lie, put LoRA on the attention, and hand both to DeepSpeed."""
    config = ds_config(options)
    transformers.set_seed(options.seed)  # the same adapter on every rank
    partitioned = HfDeepSpeedConfig(config)  # (3) while this object lives, transformers uses zero.Init
    model = AutoModelForCausalLM.from_config(llama_config(options), dtype=torch.bfloat16)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    # DeepSpeed does not cast a model that is partitioned already, so the adapter must be bf16 from the start.
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    engine, *_ = deepspeed.initialize(model=adapted, config=config)
    del partitioned
    return engine


def train(engine: Any, options: Options, progress: Progress) -> None:
    """Predict the next token of texts that each rank draws for itself."""
    ids = word_ids(python_help_topics(), options.vocabulary)
    rng = random.Random(options.seed + engine.global_rank)
    windows = Windows(ids, options.tokens, options.batch, rng)
    for _ in range(options.steps):
        started = time.perf_counter()
        tokens = torch.tensor(windows.next(), device=engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        get_accelerator().synchronize()
        progress.step_done(loss.item(), time.perf_counter() - started)


def peak_rss_bytes() -> int:
    """Return the most memory that this process held; getrusage would count the one that started it too."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError("/proc/self/status has no line VmHWM; this script needs Linux with /proc mounted")
    return 1024 * int(found.group(1))


def run(options: Options) -> int:
    """Train and report; return the exit status."""
    started = time.perf_counter()
    if options.engine == "peftds":
        import peftds_ext

        peftds_ext.install()  # (1) before anything of DeepSpeed's is set up
    join_process_group()
    first = torch.distributed.get_rank() == 0
    folder = WatchedFolder(options.nvme_path) if first and options.nvme_path else None
    if folder:
        folder.tell_at_exit(torch.distributed.get_world_size())
    torch.distributed.barrier()  # nothing is written before rank 0 has looked at the folder
    engine = start_engine(options)
    with Progress(options.steps, shown=first) as progress:
        progress.say(f"{options.engine}: parameters on {options.offload}, {options.layers} layers")
        train(engine, options, progress)
    torch.distributed.barrier()  # no rank is clearing up while rank 0 looks
    if first:
        figures = Figures(
            engine=options.engine,
            offload=options.offload,
            folder_bytes=sum(folder.new().values()) if folder else 0,
            peak_rss_bytes=peak_rss_bytes(),
            **run_figures(engine, progress, started),
        )
        report(figures, folder)
        if options.json:
            figures.write(options.json)
    torch.distributed.barrier()
    return 0


def report(figures: Figures, folder: WatchedFolder | None) -> None:
    """Print the closing tables."""
    rows = {**run_rows(figures), "peak memory of this process": f"{figures.peak_rss_bytes / 1e6:.0f} MB"}
    if folder:
        rows[f"held by {escape(str(folder.path))}"] = f"{figures.folder_bytes / 1e6:.2f} MB"
    where = "memory" if folder is None else "files"
    print_tables(f"LoRA on Llama, weights in {where}, engine: {figures.engine}", rows, figures.memory)


def main() -> int:
    return run_script(run, parse_options())


if __name__ == "__main__":
    sys.exit(main())
