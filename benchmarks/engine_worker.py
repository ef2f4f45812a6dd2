# SPDX-License-Identifier: Apache-2.0
"""One contender of ``bench_engine_step.py`` or ``bench_optimizer.py`` in a process of its own.

Run by :mod:`engine_process`. Reads one command a line from standard input and answers each with one line
of JSON on the standard output it was started with; everything that libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from baselines import bandwidth, torch_adamw
from counted import counting
from interleave import NotMeasured, Phases, timed
from problem import Problem
from torch import Tensor, nn

KINDS = ("stock", "ours", "plain", "torch")
Answer = Callable[[dict[str, Any]], None]


class Product(nn.Module):
    """``sum(weight * x)``: its backward writes one dense bf16 gradient in one pass, the least there is."""

    def __init__(self, elements: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(0.02 * torch.randn(elements, generator=generator, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


class Model(nn.Module):
    """Products as layers below the root, where ZeRO-3 expects parameters: ``parts`` of nearly equal size."""

    def __init__(self, elements: int, parts: int = 1) -> None:
        super().__init__()
        self._sizes = [(elements + part) // parts for part in range(parts)]
        self.layers = nn.ModuleList(Product(size, seed) for seed, size in enumerate(self._sizes))

    def forward(self, x: Tensor) -> Tensor:
        products = [
            layer(part) for layer, part in zip(self.layers, x.split_with_sizes(self._sizes), strict=True)
        ]
        return torch.stack(products).sum()

    def weight(self) -> Tensor:
        """Return a copy of all weights, which must be present."""
        return torch.cat([parameter.detach() for parameter in self.parameters()])


def inputs(elements: int) -> list[Tensor]:
    """Return two inputs of different size, taken in turn: gradients change, and clipping matters."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(elements, generator=generator, dtype=torch.bfloat16).mul_(factor) for factor in (1.0, 3.0)
    ]


@dataclass
class Training:
    """What a worker offers: one timed round, the present weight, and what our optimizer says it keeps."""

    round: Callable[[], Phases]
    weight: Callable[[], Tensor]
    state_bytes: Callable[[], dict[str, int]] | None = None


def torch_step(elements: int) -> Training:
    """torch's fused AdamW on one fp32 tensor; a round is its step."""
    entry = torch_adamw.fused(Problem.make(elements))
    return Training(entry.contender.run, entry.master.clone)


def plain(elements: int, parts: int) -> Training:
    """Forward and backward of the same model without DeepSpeed and without a step."""
    model, xs = Model(elements, parts), inputs(elements)
    index = 0
    loss = torch.empty(())

    def forward() -> None:
        nonlocal loss
        loss = model(xs[index % 2])

    run = timed({"forward": forward, "backward": lambda: torch.autograd.backward(loss)})

    def one_round() -> Phases:
        nonlocal index
        model.zero_grad()
        phases = run()
        index += 1
        return phases

    return Training(one_round, model.weight)


def one_rank_environment() -> None:
    """Let DeepSpeed run on the CPU, alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
    )
    os.environ["DS_ACCELERATOR"] = "cpu"


def check_whose(optimizer: object, *, ours: bool) -> None:
    """Raise unless the engine's ZeRO optimizer is the one that this worker is to measure."""
    found = any(base.__module__.startswith("peftds_ext.") for base in type(optimizer).__mro__)
    if found != ours:
        wanted = "our engine" if ours else "stock"
        raise RuntimeError(f"this worker is to measure {wanted}, and got the optimizer {type(optimizer)!r}")


def keep_messages() -> list[str]:
    """Return a list that receives what our package logs: for one, what it leaves to stock."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("peftds_ext")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return messages


def engine(
    elements: int, parts: int, config: dict[str, Any], *, install: bool, count_bytes: bool
) -> Training:
    """Build a DeepSpeed engine, ours with ``install``; a round is forward, backward and step.

    Raises:
        NotMeasured: DeepSpeed is missing, or an op that stock needs cannot work here.
    """
    one_rank_environment()
    if install:
        try:
            import deepspeed
        except ImportError as error:
            raise NotMeasured(f"DeepSpeed cannot be imported: {error}") from error
        import peftds_ext

        peftds_ext.install()
    else:
        from baselines.deepspeed_adam import cpu_adam_class
        from baselines.deepspeed_build import require_disk_ops

        cpu_adam_class()
        require_disk_ops(config["zero_optimization"], -(-elements // parts))
        import deepspeed

    model, xs = Model(elements, parts), inputs(elements)
    built, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    check_whose(built.optimizer, ours=install)
    index = 0
    loss = torch.empty(())

    def forward() -> None:
        nonlocal loss
        loss = built(xs[index % 2])

    steps = {"forward": forward, "backward": lambda: built.backward(loss), "step": built.step}
    run = (counting if count_bytes else timed)(steps)

    def one_round() -> Phases:
        nonlocal index
        phases = run()
        index += 1
        return phases

    def weight() -> Tensor:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return model.weight()

    return Training(one_round, weight, built.optimizer.peftds_state_bytes if install else None)


def _build(options: argparse.Namespace) -> Training:
    if options.kind == "plain":
        return plain(options.elements, options.parts)
    if options.kind == "torch":
        return torch_step(options.elements)
    return engine(
        options.elements,
        options.parts,
        json.loads(options.config),
        install=options.kind == "ours",
        count_bytes=options.count_bytes,
    )


def _serve(options: argparse.Namespace, answer: Answer) -> None:
    messages = keep_messages()
    training = _build(options)
    measure_memory = bandwidth.run(options.elements).run if options.kind == "plain" else None
    answer({"ready": True})
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "round":
            answer({"phases": training.round()})
        elif command == "bandwidth" and measure_memory is not None:
            answer({"phases": measure_memory()})
        elif command == "save":
            torch.save(training.weight(), Path(argument))
            answer({"saved": argument})
        elif command == "messages":
            answer({"messages": messages})
        elif command == "state_bytes" and training.state_bytes is not None:
            answer({"state_bytes": training.state_bytes()})
        else:
            raise ValueError(f"unknown command {line!r} for a worker of kind {options.kind}")


def main() -> None:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--parts", type=int, default=1, help="parameters that share the elements")
    parser.add_argument("--config", default="{}", help="DeepSpeed configuration as JSON")
    parser.add_argument("--count-bytes", action="store_true", help="count what moves to and from disks")
    options = parser.parse_args()

    serve_in_lines(lambda answer: _serve(options, answer))


def serve_in_lines(serve: Callable[[Answer], None]) -> None:
    """Run ``serve`` with a function that answers on standard output, where nothing else is printed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers)

    try:
        serve(answer)
    except NotMeasured as reason:
        answer({"not_measured": str(reason)})


if __name__ == "__main__":
    main()
