# SPDX-License-Identifier: Apache-2.0
"""Checks and times ZeRO-3 with LoRA on one GPU, if DeepSpeed is installed; gpu_check.py runs this.

Every engine is a process of its own (gpu_deepspeed_worker.py) with a time limit for each answer. Losses and
masters must be the same bits wherever the frozen weights are between their uses, and those of the same model
whole on the GPU, its hooks removed. Step times are medians of rounds in which all engines take turns.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, WorkerError
from gpu_checking import Check, all_right, guarded
from interleave import Contender, race

WORKER = Path(__file__).with_name("gpu_deepspeed_worker.py")
ANSWER_S = 90.0
"""Seconds in which an engine must be built, or take its step."""
STEPS = 5
AT_ONCE = 8
"""Engines that are built, and compared, at the same time."""

SMALL = {"hidden": 1024, "inner": 2816, "layers": 4, "vocabulary": 2048, "heads": 16}
TIMED = {"hidden": 2048, "inner": 5632, "layers": 12, "vocabulary": 8192, "heads": 16}
_TAIL = 1500
"""Characters of a log's end that a check tells."""
REHEARSED = {"hidden": 512, "inner": 1024, "layers": 3, "vocabulary": 2048, "heads": 4}

Section = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """One engine: where it keeps what, and how it is made."""

    name: str
    tier: str = "cpu"
    states: str = "cpu"
    kind: str = "ours"
    stage: int = 3
    checkpointing: bool = False
    ours: Section = field(default_factory=dict)
    """Of the section ``peftds_ext``."""


def base_bytes(shape: dict[str, int]) -> int:
    """Return the bytes of the frozen matrices."""
    layer = shape["hidden"] * (4 * shape["hidden"] + 3 * shape["inner"])
    return 2 * (shape["layers"] * layer + 2 * shape["vocabulary"] * shape["hidden"])


def compared(shape: dict[str, int], folder: Path) -> list[Engine]:
    """Return the engines whose results must be the same; the two first ones are whole on the GPU."""
    half, whole = base_bytes(shape) // 2, 2 * base_bytes(shape)

    def params(**budgets: int) -> Section:
        return {"params": budgets}

    traced = {"trace": str(folder / "trace.json")}
    late = {"optimizer": {"overlap": True}}
    return [
        Engine("resident", kind="resident"),
        Engine("resident, checkpointing", kind="resident", checkpointing=True),
        Engine("host memory, nothing stays on the device", ours={**params(device_bytes=0), **traced}),
        Engine("host memory, half stays on the device", ours=params(device_bytes=half)),
        Engine("host memory, all stays on the device", ours=params(device_bytes=whole)),
        Engine("host memory, checkpointing", checkpointing=True, ours=params(device_bytes=0)),
        Engine("disk, nothing stays", tier="nvme", ours=params(host_bytes=0, device_bytes=0)),
        Engine("disk, half stays on each", tier="nvme", ours=params(host_bytes=half, device_bytes=half)),
        Engine("disk, all stays on each", tier="nvme", ours=params(host_bytes=whole, device_bytes=whole)),
        Engine(
            "disk, states on the disk, late steps",
            tier="nvme",
            states="nvme",
            ours={**params(host_bytes=0, device_bytes=0), **late},
        ),
        Engine("host memory, late steps", ours={**params(device_bytes=0), **late}),
    ]


RESIDENT, OURS, STOCK = "resident (ZeRO-2)", "ours, base in host memory", "stock, base in host memory"
BARE, DISK = "ours, base in host memory, nothing stays on the device", "ours, base on the disk, nothing stays"
TIMES = (
    Engine(RESIDENT, stage=2),
    Engine(OURS),
    Engine(STOCK, kind="stock"),
    Engine(BARE, ours={"params": {"device_bytes": 0}}),
    Engine(DISK, tier="nvme", ours={"params": {"host_bytes": 0, "device_bytes": 0}}),
)


def configuration(engine: Engine, folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's configuration of an engine."""
    own = folder / re.sub(r"\W+", "_", engine.name)

    def place(device: str) -> dict[str, str]:
        return {"device": device} | ({"nvme_path": str(own)} if device == "nvme" else {})

    zero = {"stage": engine.stage, "offload_optimizer": place(engine.states)}
    if engine.stage == 3:
        zero["offload_param"] = place(engine.tier)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    if engine.kind == "stock":
        settings["optimizer"]["params"]["torch_adam"] = True  # its own is compiled first
    else:
        settings["peftds_ext"] = {"enabled": True, **engine.ours}
    return settings


def start(
    engine: Engine, shape: dict[str, int], tokens: int, folder: Path, *, rehearse: bool, repeatable: bool
) -> EngineProcess:
    """Start an engine; raises WorkerError unless it is there in time."""
    job = {
        "kind": engine.kind,
        "shape": shape,
        "tokens": tokens,
        "checkpointing": engine.checkpointing,
        "config": configuration(engine, folder),
        "stand_in": rehearse,
        "repeatable": repeatable,
    }
    name = re.sub(r"\W+", "_", engine.name)
    arguments = ["--job", json.dumps(job)]
    return EngineProcess(name, arguments, folder, timeout_s=ANSWER_S, worker=WORKER)


# ---- the same bits ----------------------------------------------------------------------------


def results(engine: Engine, shape: dict[str, int], folder: Path, rehearse: bool) -> dict[str, Any]:
    """Train, and return losses, masters, and what the engine says of itself."""
    with start(engine, shape, 64, folder, rehearse=rehearse, repeatable=True) as process:
        for _ in range(STEPS):
            process.run()
        found: dict[str, Any] = process.ask("result")
        if engine.kind == "ours":
            found |= {"told": process.ask("told")}
        process.ask("close")
    return found


def same_bits(folder: Path, rehearse: bool, timings: dict[str, Any]) -> Iterator[Check]:
    """Compare every tier and budget with the model that is whole on the GPU."""
    shape = REHEARSED if rehearse else SMALL
    engines = compared(shape, folder)
    references: dict[bool, dict[str, Any]] = {}
    with ThreadPoolExecutor(1 if rehearse else AT_ONCE) as pool:
        runs = [pool.submit(results, engine, shape, folder, rehearse) for engine in engines]
        for engine, run in zip(engines, runs, strict=True):
            name = f"DeepSpeed, {engine.name}"
            yield from guarded(name, lambda name=name, e=engine, r=run: _judge(name, e, r, references))  # type: ignore[misc]
    yield from guarded("DeepSpeed, the trace", lambda: trace_parses(folder / "trace.json"))


def _judge(
    name: str, engine: Engine, run: Future[dict[str, Any]], references: dict[bool, dict[str, Any]]
) -> Iterator[Check]:
    got = run.result()
    losses = got["losses"]
    wrong = [] if all(abs(loss) < 1e6 for loss in losses) else [f"losses {losses}"]  # NaN is not less either
    if engine.kind == "resident":
        references[engine.checkpointing] = got
        yield all_right(name, wrong)
        return
    reference = references.get(engine.checkpointing)
    if reference is None:
        wrong.append("there is nothing to compare with: the resident model's run failed")
    else:
        if losses != reference["losses"]:
            wrong.append(f"losses {losses}, resident {reference['losses']}")
        if got["masters"] != reference["masters"]:
            wrong.append("masters are other than the resident model's")
    counts = got["told"]["counts"]
    if not counts or not counts["bytes"]:
        wrong.append("no layers were copied to the device")
    elif engine.tier == "cpu" and counts["waits"]:
        wrong.append(f"the host waited {counts['waits']} times for a copy")
    if engine.ours.get("optimizer", {}).get("overlap") and not got["told"]["late"]:
        wrong.append("steps were not late")
    yield all_right(f"{name}: the bits of the resident model", wrong)


def trace_parses(path: Path) -> Iterator[Check]:
    """The trace is JSON, and tells of uses, copies and waits."""
    events = json.loads(path.read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [tracks[event["tid"]] for event in events if event["ph"] == "X"]
    absent = {"layers", "copies", "device waits"} - set(spans)
    detail = f"{len(spans)} spans, none of {sorted(absent)}" if absent else f"{len(spans)} spans"
    yield Check("DeepSpeed, the trace", not absent, detail)


# ---- times ------------------------------------------------------------------------------------


def times(folder: Path, rehearse: bool, timings: dict[str, Any]) -> Iterator[Check]:
    """Steps of all engines in turn; ours must not be slower than stock's."""
    shape, tokens = (REHEARSED, 16) if rehearse else (TIMED, 2048)
    with ExitStack() as stack:
        processes: dict[str, EngineProcess] = {}

        def begin(engine: Engine) -> EngineProcess:
            return start(engine, shape, tokens, folder, rehearse=rehearse, repeatable=False)

        with ThreadPoolExecutor(1 if rehearse else len(TIMES)) as pool:
            starting = [pool.submit(begin, engine) for engine in TIMES]
        for engine, future in zip(TIMES, starting, strict=True):
            error = future.exception()
            if error is None:
                processes[engine.name] = stack.enter_context(future.result())
                continue
            if not isinstance(error, WorkerError):
                raise error
            stock = engine.kind == "stock"
            yield Check(
                f"DeepSpeed, step times: {engine.name}", stock, f"not measured: {str(error)[-_TAIL:]}"
            )
        contenders = [Contender(name, process.run) for name, process in processes.items()]
        samples = race(contenders, rounds=2 if rehearse else 7, warmup_rounds=3)
        medians = {name: samples.median(name, ("step",)) for name in processes}
        timings["step_s"] = medians
        yield from _compare(medians, judged=not rehearse)
        for name in (name for name in (OURS, BARE, DISK) if name in processes):
            told = processes[name].ask("told")
            timings[name] = {"stats": told["stats"], "device_peak": told["device_peak"]}
            print(f"{name}:\n{told['text']}", flush=True)


def _compare(medians: dict[str, float], *, judged: bool) -> Iterator[Check]:
    told = [f"{name} {seconds * 1e3:.1f} ms" for name, seconds in medians.items()]
    pairs = ((RESIDENT, OURS), (RESIDENT, BARE), (RESIDENT, DISK), (STOCK, OURS), (STOCK, BARE))
    ratios = {
        f"{over} / {under}": medians[over] / medians[under]
        for over, under in pairs
        if {over, under} <= medians.keys()
    }
    told += [f"{name}: {ratio:.2f}" for name, ratio in ratios.items()]
    slower = judged and ratios.get(f"{STOCK} / {OURS}", 1.0) < 1
    yield Check(
        "DeepSpeed, step times: ours is not slower than stock", not slower, "\n    ".join(["", *told])
    )


# ---- the whole --------------------------------------------------------------------------------


def checks(folder: Path, rehearse: bool, timings: dict[str, Any]) -> Iterator[Check]:
    """Run every check; on the CPU for a rehearsal, with a stand-in for the GPU's copies."""
    if importlib.util.find_spec("deepspeed") is None:
        yield Check("DeepSpeed", True, "skipped: deepspeed is not installed")
        return
    yield from guarded("DeepSpeed, bits", lambda: same_bits(folder, rehearse, timings))
    yield from guarded("DeepSpeed, step times", lambda: times(folder, rehearse, timings))
