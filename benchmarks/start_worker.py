# SPDX-License-Identifier: Apache-2.0
"""One start of ``bench_start.py`` in a process of its own: from a checkpoint to the end of the first step.

Run by :mod:`engine_process`; commands and answers are those of :mod:`engine_worker`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
from typing import Any

import torch
from engine_worker import Answer, check_whose, one_rank_environment, serve_in_lines
from stream_worker import adapted, base_in_place, needs_async_io

STEPS = 3
LIBRARIES = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",  # its first engine imports it, with torch's compiler
    "transformers",
    "transformers.models.llama.modeling_llama",
    "peft",
)


def start(
    kind: str, checkpoint: str, config: dict[str, Any], tokens: int, *, checkpointing: bool
) -> dict[str, Any]:
    """Load, adapt, build the engine, take steps; return seconds, bytes written and bytes of memory."""
    import deepspeed
    import transformers

    idle, before = _peak_memory(), _written()
    began = time.perf_counter()
    if kind == "ours":
        base = base_in_place(checkpoint, config)
    else:
        # As the Trainer does: under this object Transformers partitions what it loads.
        alive = transformers.integrations.HfDeepSpeedConfig(config)
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        del alive
    model = adapted(base, checkpointing=checkpointing)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    check_whose(engine.optimizer, ours=kind == "ours")
    written, losses = _written() - before, []
    generator = torch.Generator().manual_seed(1)
    seconds = 0.0
    for _ in range(STEPS):
        batch = torch.randint(0, base.config.vocab_size, (1, tokens), generator=generator)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        seconds = seconds or time.perf_counter() - began
    return {
        "phases": {"start": seconds},
        "written": written,
        "memory": _peak_memory() - idle,
        "losses": losses,
    }


def _peak_memory() -> int:
    """Return the most bytes that this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _written() -> int:
    """Return the bytes that this process has sent to disks."""
    import psutil

    return int(psutil.Process(os.getpid()).io_counters().write_bytes)


def _serve(options: argparse.Namespace, answer: Answer) -> None:
    one_rank_environment()
    for library in LIBRARIES:
        importlib.import_module(library)
    config = json.loads(options.config)
    if options.kind == "ours":
        import peftds_ext

        peftds_ext.install()
    else:
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        needs_async_io()
    answer({"ready": True})
    for line in sys.stdin:
        if line.strip() != "round":
            raise ValueError(f"unknown command {line!r}")
        settings = {"tokens": options.tokens, "checkpointing": options.checkpointing}
        answer(start(options.kind, options.checkpoint, config, **settings))


def main() -> None:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("stock", "ours"), required=True)
    parser.add_argument("--checkpoint", required=True, help="folder of a checkpoint")
    parser.add_argument("--config", required=True, help="DeepSpeed configuration as JSON")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again")
    options = parser.parse_args()
    serve_in_lines(lambda answer: _serve(options, answer))


if __name__ == "__main__":
    main()
