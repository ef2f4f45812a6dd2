# SPDX-License-Identifier: Apache-2.0
"""Short runs with optimizer states on a disk that fails, and what became of them, each in a process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import limits
import torch
from ds_models import furthest, llama, lora, masters, moments, tokens
from ds_worker import Run
from nvme_runs import remains, told

GROUPS = 4
"""Sub-groups of the model, each of which is one chunk, and so one transfer."""


def engine_of(run: Run, disk: str, stage: int = 3, **io: Any) -> Any:
    config = run.config(stage=stage, zero={"offload_optimizer": {"device": "nvme", "nvme_path": disk}})
    if stage == 3:
        config["zero_optimization"]["sub_group_size"] = 200
    config["peftds_ext"] = {"enabled": True, "io": io}
    return run.initialize(lora(llama()), config)


def forward_and_backward(engine: Any, batch: torch.Tensor, factor: float = 1.0) -> float:
    loss = engine(input_ids=batch, labels=batch).loss * factor
    engine.backward(loss)
    return float(loss.detach())


def step(engine: Any, batch: torch.Tensor) -> float:
    loss = forward_and_backward(engine, batch)
    engine.step()
    return loss


def fail(run: Run, disk: str, save: str = "", stage: int = 3) -> dict[str, Any]:
    """Train until a step fails, as the environment says, and look at what can still be done."""
    result: dict[str, Any] = {"steps": 0, "initialized": False}
    try:
        engine = engine_of(run, disk, stage)
        result["initialized"] = True
        result["groups"] = len(engine.optimizer._peftds_states)
        if save:
            engine.save_checkpoint(save, tag="before")
        before = masters(engine), moments(engine)
        for batch in tokens(4):
            forward_and_backward(engine, batch)
            before = masters(engine), moments(engine)
            engine.step()
            result["steps"] += 1
    except Exception as error:
        result["error"] = told(error)
    if result["initialized"] and "error" in result:
        for name, attempt in (
            ("step", lambda: step(engine, tokens(1)[0])),
            ("read", lambda: masters(engine)),
            ("save", lambda: engine.save_checkpoint(str(run.tmp / "later"))),
        ):
            try:
                attempt()
            except Exception as error:
                result[f"error of {name}"] = told(error)
            else:
                result[f"error of {name}"] = None
                if name == "read":
                    result["steps after"] = engine.optimizer._peftds_states.steps(0)
        result["before"] = before
    result["remains"] = remains(disk)
    return result


def fail_first(run: Run, disk: str) -> dict[str, Any]:
    """Let the very first read of a step fail, and look at the states before the step is tried again."""
    engine = engine_of(run, disk)
    batches = tokens(3)
    forward_and_backward(engine, batches[0])
    before = masters(engine), moments(engine)
    engine.optimizer._peftds_states._store._file._extents["group0[0:256]"].written = False
    error = None
    try:
        engine.step()
    except Exception as raised:
        error = told(raised)
    engine.optimizer._peftds_states._store._file._extents["group0[0:256]"].written = True
    apart = [
        furthest(now, then) for now, then in zip((masters(engine), moments(engine)), before, strict=True)
    ]
    return {"error": error, "apart": apart, "losses": [step(engine, batch) for batch in batches[1:]]}


def fail_under_hooks(run: Run, disk: str) -> dict[str, Any]:
    """Let DeepSpeed step sub-groups one by one, and a later one fail."""
    engine = engine_of(run, disk)
    engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    batches = tokens(3)
    step(engine, batches[0])
    forward_and_backward(engine, batches[1])
    list(engine.optimizer._peftds_states._store._file._extents.values())[-1].written = False
    errors = []
    for attempt in (engine.step, lambda: masters(engine)):
        try:
            attempt()
        except Exception as error:
            errors.append(type(error).__name__)
    return {"errors": errors}


def full_disk(run: Run, disk: str, size: str) -> dict[str, Any]:
    """Initialize on a file system that has too little room."""
    if reason := limits.mount_in_memory(Path(disk), f"size={size}"):
        return {"skip": reason}
    try:
        engine_of(run, disk)
    except Exception as error:
        return {"error": told(error), "remains": remains(disk)}
    return {"error": None}


def not_a_number(run: Run, disk: str, stage: int = 3) -> dict[str, Any]:
    """Train, meet a gradient that is not a number, and train on."""
    engine = engine_of(run, disk, stage)
    batches = tokens(3)
    step(engine, batches[0])
    before = masters(engine), moments(engine)
    forward_and_backward(engine, batches[1], factor=float("nan"))
    engine.step()
    after = masters(engine), moments(engine)
    return {
        "apart": [furthest(now, then) for now, then in zip(after, before, strict=True)],
        "loss": step(engine, batches[2]),
        "norm": float(engine.get_global_grad_norm()),
    }


def damaged(run: Run, disk: str, where: int) -> dict[str, Any]:
    """Let somebody else change a byte of the file between two steps."""
    engine = engine_of(run, disk)
    step(engine, tokens(1)[0])
    (path,) = Path(disk).glob("peftds_ext_swap/*/data.bin")
    with path.open("r+b") as file:
        file.seek(where)
        (byte,) = file.read(1)
        file.seek(where)
        file.write(bytes([byte ^ 1]))
    try:
        step(engine, tokens(1)[0])
    except Exception as error:
        return {"error": told(error)}
    return {"error": None}


def killed(run: Run, disk: str, save: str) -> None:
    """Train, save, and die when a part of the next step is written."""
    from peftds_ext import ops

    engine = engine_of(run, disk)
    batches = tokens(4)
    for batch in batches[:2]:
        step(engine, batch)
    engine.save_checkpoint(save, tag="two")
    calls, kernel = [], ops.adamw_step_

    def die(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        kernel(*args, **kwargs)

    ops.adamw_step_ = die
    step(engine, batches[2])


def resume(run: Run, disk: str, save: str) -> dict[str, Any]:
    """Go on from a checkpoint, if there is one to go on from; else train as if nothing had happened."""
    engine = engine_of(run, disk)
    batches = tokens(4)
    if save:
        engine.load_checkpoint(save, tag="two")
    else:
        for batch in batches[:2]:
            step(engine, batch)
    losses = [step(engine, batch) for batch in batches[2:]]
    folders = len(list(Path(disk).glob("peftds_ext_swap/rank*")))
    return {"losses": losses, "masters": masters(engine), "folders": folders}
