# SPDX-License-Identifier: Apache-2.0
"""``peftds plan``: memory of model states for each ZeRO stage, as a table or as JSON.

A value that cannot be read, and options that exclude or need each other, are usage errors (exit status 2).
Values that can be read and contradict each other, DeepSpeed or the checkpoint are ``ConfigError`` (status 1).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from peftds_ext.errors import ConfigError
from peftds_ext.planner.checkpoint import lora_count, parameter_count, read_shapes
from peftds_ext.planner.memory import DType, Place, StageMemory, State, Training, model_states
from peftds_ext.planner.placement import check_stage, permitted_stages
from peftds_ext.planner.sizes import Share, Unit, format_bytes, parse_bytes, parse_count, parse_share

NOTE: Final = "model states only; activations, temporary buffers and fragmentation come on top"
NO_MASTER_NOTE: Final = "without an fp32 master; DeepSpeed's ZeRO always keeps one for trainable parameters"
PARAM_NOTE: Final = "offloaded parameters return to the GPU layer by layer; those layers come on top"
NVME_NOTE: Final = "tensors below 1 MiB per rank stay in memory; DeepSpeed's swap buffers come on top"

_HEADERS: Final = {
    State.PARAMETERS: "parameters",
    State.GRADIENTS: "gradients",
    State.MASTER: "fp32\nmaster",
    State.EXP_AVG: "exp_avg",
    State.EXP_AVG_SQ: "exp_avg_sq",
}
_PLACES: Final = {Place.GPU: "per_gpu", Place.CPU: "per_host", Place.NVME: "per_nvme"}
_Value = TypeVar("_Value")


def _reader(parse: Callable[[str], _Value], metavar: str) -> dict[str, Any]:
    """Return the option arguments that read a value with ``parse`` and report its ConfigError as usage."""

    def read(text: str) -> _Value:
        try:
            return parse(text)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from None

    return {"parser": read, "metavar": metavar}


Params = Annotated[
    int | None,
    typer.Option("--params", help="Parameters of the model: 7e9, 7B.", **_reader(parse_count, "COUNT")),
]
Model = Annotated[
    Path | None,
    typer.Option("--model", help="Instead of --params: a local checkpoint folder with safetensors files."),
]
LoraRank = Annotated[
    int | None, typer.Option("--lora-rank", min=1, help="With --model: train LoRA adapters of this rank.")
]
TargetModules = Annotated[
    str | None, typer.Option("--target-modules", help="Modules that get an adapter: q_proj,v_proj.")
]
Trainable = Annotated[
    Share | None,
    typer.Option(
        "--trainable",
        help="Parameters that are trained: 40e6 or 0.5%; the others are frozen. All, if left out.",
        **_reader(parse_share, "COUNT|PERCENT"),
    ),
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="GPUs on all nodes together (world size).")]
GpusPerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of one node. All, if left out.")
]
Stage = Annotated[
    int | None,
    typer.Option("--stage", min=0, max=3, help="Only this ZeRO stage. If left out, all that are possible."),
]
ParamDType = Annotated[DType, typer.Option("--dtype", help="Dtype of the parameters.")]
GradDType = Annotated[
    DType | None, typer.Option("--grad-dtype", help="Dtype of gradients. That of --dtype, if left out.")
]
Master = Annotated[
    bool, typer.Option("--master/--no-master", help="With or without the fp32 master that DeepSpeed keeps.")
]
OptimizerDevice = Annotated[
    Place, typer.Option("--optimizer-device", help="Where gradients, master and moments are kept.")
]
ParamDevice = Annotated[Place, typer.Option("--param-device", help="Where parameters are kept.")]
GpuMemory = Annotated[
    int | None,
    typer.Option(
        "--gpu-memory",
        help="Say which stages fit this much GPU memory: 24GB, 24GiB.",
        **_reader(parse_bytes, "SIZE"),
    ),
]
ShownUnit = Annotated[Unit, typer.Option("--unit", help="Unit of the table: decimal GB or binary GiB.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print bytes as JSON instead of a table.")]


def plan(
    params: Params = None,
    model: Model = None,
    lora_rank: LoraRank = None,
    target_modules: TargetModules = None,
    trainable: Trainable = None,
    gpus: Gpus = 1,
    gpus_per_node: GpusPerNode = None,
    stage: Stage = None,
    dtype: ParamDType = DType.FP16,
    grad_dtype: GradDType = None,
    master: Master = True,
    optimizer_device: OptimizerDevice = Place.GPU,
    param_device: ParamDevice = Place.GPU,
    gpu_memory: GpuMemory = None,
    unit: ShownUnit = Unit.GB,
    as_json: AsJson = False,
) -> None:
    """Memory of parameters, gradients and Adam states per GPU, host and NVMe, for each ZeRO stage."""
    total, trained = _model_size(params, model, lora_rank, target_modules, trainable)
    training = Training(
        parameters=total,
        trainable=trained,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        dtype=dtype,
        gradient_dtype=grad_dtype,
        master=master,
        optimizer_device=optimizer_device,
        param_device=param_device,
    )
    if stage is not None:
        check_stage(training, stage)
    stages = permitted_stages(training) if stage is None else (stage,)
    rows = [model_states(training, each) for each in stages]
    if as_json:
        typer.echo(json.dumps(_as_json(training, rows, gpu_memory), indent=2))
    else:
        _print_tables(Console(highlight=False), training, rows, unit, gpu_memory)


def _model_size(
    params: int | None,
    model: Path | None,
    lora_rank: int | None,
    target_modules: str | None,
    trainable: Share | None,
) -> tuple[int, int | None]:
    """Return all parameters, adapters included, and the trainable ones (None: all)."""
    if params is not None and model is not None:
        raise typer.BadParameter("--params and --model exclude each other")
    if (lora_rank is None) != (target_modules is None):
        raise typer.BadParameter("--lora-rank and --target-modules need each other")
    if lora_rank is not None and trainable is not None:
        raise typer.BadParameter("--lora-rank and --trainable exclude each other")
    if model is not None:
        shapes = read_shapes(model)
        total = parameter_count(shapes)
        if lora_rank is not None and target_modules is not None:
            targets = [name.strip() for name in target_modules.split(",") if name.strip()]
            adapters = lora_count(shapes, lora_rank, targets)
            return total + adapters, adapters
    elif lora_rank is not None:
        raise typer.BadParameter("--lora-rank counts the shapes of --model: give it, or use --trainable")
    elif params is None:
        raise typer.BadParameter("give --params or --model")
    else:
        total = params
    return total, None if trainable is None else trainable.of(total)


def _as_json(training: Training, rows: list[StageMemory], gpu_memory: int | None) -> dict[str, Any]:
    """Return the inputs and, for each stage and place, bytes of each state as integers."""
    inputs = {
        "parameters": training.parameters,
        "trainable": training.trainable_count,
        "gpus": training.gpus,
        "gpus_per_node": training.ranks_per_node,
        "dtype": training.dtype.value,
        "grad_dtype": training.accumulation_dtype.value,
        "moments_dtype": DType.FP32.value,
        "master": training.master,
        "optimizer_device": training.optimizer_device.value,
        "param_device": training.param_device.value,
        "gpu_memory_bytes": gpu_memory,
    }
    stages: list[dict[str, Any]] = []
    for row in rows:
        entry: dict[str, Any] = {"stage": row.stage}
        for place, key in _PLACES.items():
            entry[key] = {state.value: row.bytes_at(place, state) for state in State}
            entry[key]["total"] = row.bytes_at(place)
        entry["fits_gpu_memory"] = None if gpu_memory is None else row.bytes_at(Place.GPU) <= gpu_memory
        stages.append(entry)
    return {"inputs": inputs, "stages": stages, "notes": _notes(training)}


def _notes(training: Training) -> list[str]:
    notes = [NOTE]
    if not training.master:
        notes.append(NO_MASTER_NOTE)
    if training.param_device is not Place.GPU:
        notes.append(PARAM_NOTE)
    if Place.NVME in (training.optimizer_device, training.param_device):
        notes.append(NVME_NOTE)
    return notes


def _print_tables(
    console: Console, training: Training, rows: list[StageMemory], unit: Unit, gpu_memory: int | None
) -> None:
    """Print a table for the GPU, and one for host and NVMe each where they hold anything."""
    ranks = training.ranks_per_node
    console.print(
        f"{training.parameters:,} parameters, {training.trainable_count:,} trainable; "
        f"{training.gpus} GPU(s), {ranks} per node; "
        f"{training.dtype.value}, gradients {training.accumulation_dtype.value}, moments fp32",
        soft_wrap=True,
    )
    titles = {
        Place.GPU: f"per GPU, {unit.value}",
        Place.CPU: f"per host ({ranks} rank(s)), {unit.value}",
        Place.NVME: f"NVMe per node ({ranks} rank(s)), {unit.value}",
    }
    for place, title in titles.items():
        if place is Place.GPU or any(row.bytes_at(place) for row in rows):
            limit = gpu_memory if place is Place.GPU else None
            console.print()
            console.print(title)
            _print_uncut(console, _table(rows, place, unit, limit))
    for note in _notes(training):
        console.print(f"Note: {note}.", soft_wrap=True)


def _table(rows: list[StageMemory], place: Place, unit: Unit, limit: int | None) -> Table:
    """Build one row per stage, one column per state, the total, and whether it fits ``limit`` bytes."""
    lines = []
    for row in rows:
        sizes = [*(row.bytes_at(place, state) for state in State), row.bytes_at(place)]
        cells = [str(row.stage), *(format_bytes(size, unit) for size in sizes)]
        if limit is not None:
            cells.append("yes" if sizes[-1] <= limit else "no")
        lines.append(cells)
    headers = ["ZeRO", *_HEADERS.values(), "total"]
    if limit is not None:
        headers.append(f"fits\n{format_bytes(limit, unit)} {unit.value}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for cells in lines:
        table.add_row(*cells)
    return table


def _print_uncut(console: Console, table: Table) -> None:
    """Print ``table`` at its full width, on a narrower terminal too: a number cut short is a wrong number."""
    full = console.measure(table, options=console.options.update(width=10_000)).maximum
    console.width = max(console.width, full)
    console.print(table)
