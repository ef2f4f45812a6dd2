# SPDX-License-Identifier: Apache-2.0
"""What the scripts show: progress while they train, and where memory lies and what came out at the end."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from torch import Tensor

LINE_EVERY = 10
"""Steps per line of output where there is no terminal to draw a bar on."""
WARM_UP_STEPS = 3
"""Steps left out of the time per step: DeepSpeed records the order of layers in the first ones."""
AVERAGED_STEPS = 5
"""Losses averaged for the first and the last loss, as that of a single batch is noisy."""

console = Console()


@dataclass(frozen=True)
class MemoryRow:
    """One kind of state held by the engine on this rank."""

    name: str
    device: str
    dtype: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class Placement:
    """How many parameters, or parts of them, lie where on this rank, and their bytes."""

    nvme_parameters: int
    nvme_bytes: int
    memory_parameters: int
    memory_bytes: int


@dataclass(frozen=True)
class InPlace:
    """What all ranks together read from the model's own files, and its bytes there."""

    parameters: int
    bytes: int
    files: list[str]

    @classmethod
    def of(cls, model: Any) -> InPlace:
        """Ask a model that ``peftds_ext.from_pretrained`` made."""
        where = model.peftds_placement
        return cls(len(where.in_place), where.in_place_bytes, sorted(set(where.in_place.values())))

    def __str__(self) -> str:
        names = ", ".join(Path(file).name for file in self.files)
        return escape(f"{self.parameters}, {self.bytes / 1e6:.2f} MB of {names}")


@dataclass(frozen=True)
class AdapterCheck:
    """The largest differences between embeddings of the trained model and of the reloaded one."""

    path: str
    difference: float
    tolerance: float
    difference_from_base: float

    @property
    def passed(self) -> bool:
        """Whether the reloaded model equals the trained one; NaN does not."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class RunFigures:
    """What every script reports. Losses and times are those of rank 0, memory is per rank."""

    engine: str
    offload: str
    device: str
    ranks: int
    losses: list[float]
    step_seconds: list[float]
    placement: Placement
    memory: list[MemoryRow]
    total_seconds: float

    @property
    def averaged_steps(self) -> int:
        """Steps in the first and in the last loss: ``AVERAGED_STEPS``, fewer where they would overlap."""
        return min(AVERAGED_STEPS, max(1, len(self.losses) // 2))

    @property
    def loss_first(self) -> float:
        return statistics.fmean(self.losses[: self.averaged_steps])

    @property
    def loss_last(self) -> float:
        return statistics.fmean(self.losses[-self.averaged_steps :])

    @property
    def median_step_seconds(self) -> float:
        """Median after the warm-up, or of all steps where there are no more than that."""
        return statistics.median(self.step_seconds[WARM_UP_STEPS:] or self.step_seconds)

    def write(self, path: Path) -> None:
        """Write the figures as JSON."""
        derived = {name: getattr(self, name) for name in ("loss_first", "loss_last", "median_step_seconds")}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(derived | asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class Figures(RunFigures):
    """All that the demo reports."""

    recall_before: float
    recall_after: float
    adapter: AdapterCheck
    in_place: InPlace | None
    """With ``--offload checkpoint``."""
    written_bytes: int | None
    """What the folder on NVMe held before the first step; None where the parameters are in memory."""


def run_figures(engine: Any, progress: Progress, started: float) -> dict[str, Any]:
    """Return the fields of :class:`RunFigures` that a live engine and its progress give."""
    return {
        "device": str(engine.device),
        "ranks": engine.world_size,
        "losses": progress.losses,
        "step_seconds": progress.seconds,
        "placement": placement(engine.module.parameters()),
        "memory": memory_rows(engine),
        "total_seconds": time.perf_counter() - started,
    }


def on_nvme(parameter: Any) -> bool:
    """Whether DeepSpeed keeps this rank's part of the parameter in a file between its uses."""
    return bool(parameter.ds_tensor.final_location == "nvme")


def part_bytes(parameter: Any) -> int:
    """Return the bytes of this rank's part, whether it is in memory at the moment or not."""
    return int(parameter.ds_tensor.ds_numel * parameter.element_size())


def placement(parameters: Iterable[Any]) -> Placement:
    """Count where the parameters of a ZeRO-3 engine lie between their uses."""
    held = list(parameters)
    stored = [part_bytes(parameter) for parameter in held if on_nvme(parameter)]
    kept = [part_bytes(parameter) for parameter in held if not on_nvme(parameter)]
    return Placement(len(stored), sum(stored), len(kept), sum(kept))


def memory_rows(engine: Any) -> list[MemoryRow]:
    """Measure what a live ZeRO-3 engine holds on this rank: its parameters' homes and optimizer states."""
    parameters = list(engine.module.parameters())
    masters = engine.optimizer.fp32_partitioned_groups_flat
    states = (engine.optimizer.optimizer.state[master] for master in masters)
    values = (value for state in states for value in state.values())
    moments = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
    copies = [master.grad for master in masters if master.grad is not None]
    return [
        *_parameter_rows("frozen parameters", [p for p in parameters if not p.requires_grad]),
        *_parameter_rows("trainable parameters", [p for p in parameters if p.requires_grad]),
        _row("master weights", masters),
        _row("Adam moments", moments),
        _row("gradients", [engine.optimizer.grad_partitions_flat_buffer]),
        _row("second copy of the gradients", copies),
    ]


def _parameter_rows(name: str, parameters: Sequence[Any]) -> list[MemoryRow]:
    """Return one row for what stays in memory and, where there is any, one for what lies on NVMe."""
    rows = [_row(name, (parameter.ds_tensor for parameter in parameters if not on_nvme(parameter)))]
    stored = [parameter for parameter in parameters if on_nvme(parameter)]
    if stored:
        total = sum(part_bytes(parameter) for parameter in stored)
        dtypes = _dtypes(parameter.dtype for parameter in stored)
        rows.append(MemoryRow(f"{name} on NVMe", "nvme", dtypes, len(stored), total))
    return rows


def _row(name: str, tensors: Iterable[Tensor]) -> MemoryRow:
    held = list(tensors)
    return MemoryRow(
        name,
        device=", ".join(sorted({str(tensor.device) for tensor in held})) or "-",
        dtype=_dtypes(tensor.dtype for tensor in held),
        tensors=len(held),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in held),
    )


def _dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})) or "-"


class Progress:
    """Collects losses and times; draws a bar on a terminal, else writes a line every ``LINE_EVERY`` steps.

    Ranks that do not show anything collect all the same.
    """

    def __init__(self, steps: int, *, shown: bool) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._steps, self._shown = steps, shown
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
        self._bar = RichProgress(*columns, TimeRemainingColumn(), console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        if self._shown:
            console.print(text, highlight=False)

    def step_done(self, loss: float, seconds: float) -> None:
        """Note one training step."""
        self.losses.append(loss)
        self.seconds.append(seconds)
        done = len(self.losses)
        text = f"loss {loss:.3f}  {seconds:.2f} s/step"
        if self._shown and console.is_terminal:
            if self._task is None:
                self._bar.start()
                self._task = self._bar.add_task(text, total=self._steps)
            self._bar.update(self._task, completed=done, description=text)
        elif done == 1 or done % LINE_EVERY == 0 or done == self._steps:
            self.say(f"step {done:>4}/{self._steps}  {text}")


def run_rows(figures: RunFigures) -> dict[str, str]:
    """Return the lines of the closing table that every script has."""
    where = figures.placement
    return {
        f"loss, mean of first and last {figures.averaged_steps} steps": (
            f"{figures.loss_first:.3f} -> {figures.loss_last:.3f}"
        ),
        "time per step, median": f"{figures.median_step_seconds:.3f} s",
        "time in all": f"{figures.total_seconds:.0f} s on {figures.ranks} x {figures.device}",
        "parameters on NVMe": f"{where.nvme_parameters}, {where.nvme_bytes / 1e6:.2f} MB",
        "parameters in memory": f"{where.memory_parameters}, {where.memory_bytes / 1e6:.2f} MB",
    }


def print_figures(figures: Figures) -> None:
    """Print the closing tables of the demo."""
    check = figures.adapter
    recall = f"{figures.recall_before:.3f} -> {figures.recall_after:.3f}"
    reloaded = (
        f"{'equal' if check.passed else '[red]NOT EQUAL[/]'}: difference "
        f"{check.difference:.1e}, allowed {check.tolerance:.1e}, "
        f"without the adapter {check.difference_from_base:.1e}"
    )
    rows = {"recall@1 on held-out paragraphs": recall, **run_rows(figures)}
    if figures.in_place:
        rows["read in place"] = str(figures.in_place)
    if figures.written_bytes is not None:
        rows["written before the first step"] = f"{figures.written_bytes:,} bytes"
    rows |= {"adapter": escape(check.path), "reloaded with PEFT": reloaded}
    print_tables(f"LoRA on MiniLM, engine: {figures.engine}", rows, figures.memory)


def print_tables(title: str, rows: Mapping[str, str], memory: Iterable[MemoryRow]) -> None:
    """Print the two closing tables; the values of ``rows`` may hold markup."""
    results = Table(title=title, show_header=False)
    for name, value in rows.items():
        results.add_row(name, value)
    console.print(results)
    held = Table("held by the engine, per rank", "where", "dtype", title="Memory")
    held.add_column("tensors", justify="right")
    held.add_column("MB", justify="right")
    for row in memory:
        held.add_row(row.name, row.device, row.dtype, str(row.tensors), f"{row.bytes / 1e6:.2f}")
    console.print(held)
