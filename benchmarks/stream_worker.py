# SPDX-License-Identifier: Apache-2.0
"""One contender of ``bench_stream.py`` in a process of its own: LoRA on a Llama with random weights.

Run by :mod:`engine_process`; commands and answers are those of :mod:`engine_worker`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from engine_worker import Answer, check_whose, keep_messages, one_rank_environment, serve_in_lines
from interleave import NotMeasured, Phases

KINDS = ("stock", "ours")


@dataclass(frozen=True)
class Shape:
    """The model and the batch."""

    hidden: int
    layers: int
    vocabulary: int
    tokens: int
    checkpointing: bool = False


def build_base(shape: Shape) -> Any:
    """Return a bf16 Llama with random weights, the same in every process."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.hidden // 64),
        num_key_value_heads=max(1, shape.hidden // 64),
        vocab_size=shape.vocabulary,
        dtype=torch.bfloat16,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def adapted(base: Any, *, checkpointing: bool) -> Any:
    """Put LoRA on the attention's four projections, for training; the same in every process.

    ``checkpointing``: activations of a layer are computed again in the backward pass.
    """
    import peft

    torch.manual_seed(1)
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def base_in_place(checkpoint: str, config: dict[str, Any]) -> Any:
    """Return the same Llama with its weights in the files of a checkpoint."""
    import transformers

    import peftds_ext

    return peftds_ext.from_pretrained(transformers.AutoModelForCausalLM, checkpoint, config=config)


class Training:
    """An engine, its batches and its losses."""

    def __init__(
        self, shape: Shape, config: dict[str, Any], *, install: bool, checkpoint: str | None
    ) -> None:
        """Build the engine; with ``checkpoint`` from a model in place.

        Raises:
            NotMeasured: DeepSpeed's own op is needed and can be neither loaded nor built.
        """
        one_rank_environment()
        import deepspeed

        if install:
            import peftds_ext

            peftds_ext.install()
        else:
            # Collectives in shared memory, which stock compiles before anything else: one rank has none.
            importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
            if config["zero_optimization"]["offload_param"]["device"] == "nvme":
                needs_async_io()
        base = base_in_place(checkpoint, config) if checkpoint else build_base(shape)
        model = adapted(base, checkpointing=shape.checkpointing)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
        check_whose(self.engine.optimizer, ours=install and self.engine.zero_optimization_stage() == 3)
        generator = torch.Generator().manual_seed(1)
        self._batches = torch.randint(0, shape.vocabulary, (8, 1, shape.tokens), generator=generator)
        self.losses: list[float] = []

    def round(self) -> Phases:
        """Take one step."""
        batch = self._batches[len(self.losses) % len(self._batches)]
        start = time.perf_counter()
        loss = self.engine(input_ids=batch, labels=batch).loss
        self.engine.backward(loss)
        self.engine.step()
        seconds = time.perf_counter() - start
        self.losses.append(float(loss.detach()))
        return {"step": seconds}

    def stats(self) -> str:
        """Return what our engine says of its steps."""
        import peftds_ext

        return str(peftds_ext.stats(self.engine))


def needs_async_io() -> None:
    """Raise NotMeasured unless stock can read from NVMe here."""
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    try:
        builder.load(verbose=False)
    except Exception as error:  # whatever a failed build raises
        raise NotMeasured(f"DeepSpeed's async_io cannot be built: {error}") from error


def _serve(options: argparse.Namespace, answer: Answer) -> None:
    messages = keep_messages()
    training = Training(
        Shape(**json.loads(options.shape)),
        json.loads(options.config),
        install=options.kind == "ours",
        checkpoint=options.checkpoint,
    )
    answer({"ready": True})
    for line in sys.stdin:
        command = line.strip()
        if command == "round":
            answer({"phases": training.round()})
        elif command == "losses":
            answer({"losses": training.losses})
        elif command == "stats":
            answer({"stats": training.stats()})
        elif command == "messages":
            answer({"messages": messages})
        else:
            raise ValueError(f"unknown command {line!r}")


def main() -> None:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--shape", required=True, help="a Shape as JSON")
    parser.add_argument("--config", required=True, help="DeepSpeed configuration as JSON")
    parser.add_argument("--checkpoint", help="folder of a checkpoint to read in place")
    options = parser.parse_args()
    serve_in_lines(lambda answer: _serve(options, answer))


if __name__ == "__main__":
    main()
