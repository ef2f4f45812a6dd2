# SPDX-License-Identifier: Apache-2.0
"""Does a model learn as well with Adam's moments in bf16 or int8? Train it both ways and compare.

    python examples/convergence.py                            # both models, all formats, three seeds
    python examples/convergence.py --model llama --formats fp32 int8 --seeds 0

``minilm`` fine-tunes all layers of all-MiniLM-L6-v2 (not its embeddings) to guess masked words; ``llama``
trains a small Llama from random weights to guess the next one. The text of both is Python's own help; nothing
is downloaded. All runs of a model see the same batches in the same order. The seed decides the weights that
are random at first, and dropout, so the spread of the fp32 runs shows what chance does.

Each finished run is a line of ``losses.jsonl`` in the output folder, and is not run again; the table and the
plot there are made of all that are in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from sentence_encoder import model_dir
from topics_data import python_help_topics
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForMaskedLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from peftds_ext import FusedAdamW
from peftds_ext.errors import CorruptDataError, MissingDependencyError, PeftdsError

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"states": "fp32"},
    "bf16": {"states": "bf16"},
    "bf16-nearest": {"states": "bf16", "rounding": "nearest"},
    "int8": {"states": "int8"},
    "int8-nearest": {"states": "int8", "rounding": "nearest"},
}
"""What FusedAdamW is given. The first one is what the others are compared with."""
EXACT = next(iter(FORMATS))

FINAL_STEPS = 50
SMOOTHED_STEPS = 25
MASKED_SHARE = 0.2
MAX_GRAD_NORM = 1.0

console = Console()


@dataclass(frozen=True)
class Problem:
    """A model and how it is trained: the loss of a step depends on its number and the weights alone."""

    module: torch.nn.Module
    loss: Callable[[int], Tensor]
    lr: float

    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Run:
    """One training run, and its losses when it is finished."""

    model: str
    format: str
    seed: int
    steps: int
    losses: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.model, self.format, self.seed, self.steps

    @property
    def final(self) -> float:
        return statistics.fmean(self.losses[-FINAL_STEPS:])


# ---- the two models ----------------------------------------------------------------------------------


def text_pieces(tokenizer: Any) -> Tensor:
    """Return the help texts, one after another, as word pieces."""
    text = "\n".join(sorted(set(python_help_topics().values())))
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def rows_of(pieces: Tensor, length: int, batch: int, step: int) -> Tensor:
    """Return the batch of a step: rows that come in shuffled order, each once before any comes again."""
    rows = pieces[: len(pieces) // length * length].view(-1, length)
    per_pass = len(rows) // batch
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step // per_pass))
    start = step % per_pass * batch
    return rows[order[start : start + batch]]


def minilm() -> Problem:
    """The pretrained encoder, and a head for masked words that starts from random weights."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    pieces = text_pieces(tokenizer)
    model: Any = AutoModelForMaskedLM.from_pretrained(model_dir(), dtype=torch.float32)
    model.bert.embeddings.requires_grad_(False)  # the head's matrix is that of the embeddings
    model.train()
    ends = tokenizer.cls_token_id, tokenizer.sep_token_id

    def loss(step: int) -> Tensor:
        rows = functional.pad(rows_of(pieces, 30, 4, step), (1, 1))
        rows[:, 0], rows[:, -1] = ends
        masked = torch.rand(rows.shape, generator=torch.Generator().manual_seed(step)) < MASKED_SHARE
        masked[:, 0] = masked[:, -1] = False
        masked[:, 1] |= ~masked.any(dim=1)
        hidden = model.bert(rows.masked_fill(masked, tokenizer.mask_token_id)).last_hidden_state
        return functional.cross_entropy(model.cls(hidden[masked]), rows[masked])

    return Problem(model, loss, lr=2e-4)


def llama() -> Problem:
    """Four layers over the word pieces that occur, from random weights."""
    vocabulary, pieces = torch.unique(
        text_pieces(AutoTokenizer.from_pretrained(model_dir())), return_inverse=True
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    model.train()

    def loss(step: int) -> Tensor:
        rows = rows_of(pieces, 48, 4, step)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    return Problem(model, loss, lr=1e-3)


MODELS: dict[str, Callable[[], Problem]] = {"minilm": minilm, "llama": llama}

# ---- training ------------------------------------------------------------------------------------------


def train(run: Run) -> Run:
    """Return the run with its losses."""
    transformers.set_seed(run.seed)
    problem = MODELS[run.model]()
    optimizer = FusedAdamW(problem.trained(), lr=problem.lr, **FORMATS[run.format])
    warm_up = max(1, run.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (run.steps - step) / (run.steps - warm_up + 1))
    )
    losses = []
    title = f"{run.model} {run.format} seed {run.seed}"
    for step in track(range(run.steps), title, console=console, disable=not console.is_terminal):
        loss = problem.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(problem.trained(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return Run(*run.key, tuple(losses))


def read_runs(path: Path) -> list[Run]:
    """Read the finished runs.

    Raises:
        CorruptDataError: a line is not a run.
    """
    runs = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            fields = json.loads(line)
            runs.append(Run(**{**fields, "losses": tuple(fields["losses"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptDataError(
                f"{path}, line {number}, is not the record of a run ({error}). Delete the line and rerun"
            ) from error
    return runs


def wanted_runs(options: Options) -> Iterator[Run]:
    """Yield all that the command line asks for; the first seed of everything comes first."""
    for seed in options.seeds:
        for model in options.model:
            for name in options.formats:
                yield Run(model, name, seed, options.steps)


# ---- the report ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the table: runs of one model with one format, beside the fp32 runs."""

    model: str
    format: str
    seeds: int
    final: float
    """Mean over the seeds, of the mean of the last steps."""
    change: float
    """The same minus that of the fp32 runs with the same seeds."""
    spread: tuple[float, float]
    """Smallest and largest of all fp32 runs."""
    not_above: int
    """Runs that end within the spread, or below."""


def runs_of(runs: Sequence[Run], model: str) -> dict[str, dict[int, Run]]:
    """Return the runs of a model by format and seed, without seeds that have no fp32 run."""
    exact = {run.seed: run for run in runs if (run.model, run.format) == (model, EXACT)}
    found = {
        name: {
            run.seed: run for run in runs if (run.model, run.format) == (model, name) and run.seed in exact
        }
        for name in FORMATS
    }
    return {name: by_seed for name, by_seed in found.items() if by_seed}


def table_rows(runs: Sequence[Run]) -> list[Row]:
    """Summarize runs of equally many steps."""
    rows = []
    for model in MODELS:
        by_format = runs_of(runs, model)
        for name, by_seed in by_format.items():
            exact = {seed: run.final for seed, run in by_format[EXACT].items()}
            row = Row(
                model,
                name,
                seeds=len(by_seed),
                final=statistics.fmean(run.final for run in by_seed.values()),
                change=statistics.fmean(run.final - exact[seed] for seed, run in by_seed.items()),
                spread=(min(exact.values()), max(exact.values())),
                not_above=sum(run.final <= max(exact.values()) for run in by_seed.values()),
            )
            rows.append(row)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    head = "model", "moments", "seeds", "final loss", "minus fp32, same seeds", "fp32 runs", "not above"
    lines = [head, ("---",) * len(head)]
    for row in rows:
        change = "" if row.format == EXACT else f"{row.change:+.4f}"
        spread = f"{row.spread[0]:.4f} to {row.spread[1]:.4f}"
        not_above = f"{row.not_above} of {row.seeds}"
        lines.append((row.model, row.format, str(row.seeds), f"{row.final:.4f}", change, spread, not_above))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def smoothed(losses: Sequence[float]) -> Tensor:
    """Return running means, one for each step from ``SMOOTHED_STEPS``, or one of all if there are fewer."""
    return torch.tensor(losses).unfold(0, min(SMOOTHED_STEPS, len(losses)), 1).mean(dim=1)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draw mean losses over the seeds, and below them how far they are from fp32 with the same seeds."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib draws the plot. Run: pip install matplotlib") from error
    models = [model for model in MODELS if runs_of(runs, model)]
    figure = Figure(figsize=(5 * len(models), 6), layout="constrained")
    grid: Any = figure.subplots(2, len(models), squeeze=False, sharex="col", height_ratios=(3, 2))
    for model, upper, lower in zip(models, *grid, strict=True):
        by_format = runs_of(runs, model)
        exact = {seed: smoothed(run.losses) for seed, run in by_format[EXACT].items()}
        band = torch.stack(list(exact.values()))
        last = by_format[EXACT][next(iter(exact))].steps
        steps = range(last - band.shape[1] + 1, last + 1)
        for axes, base in ((upper, 0.0), (lower, band.mean(dim=0))):
            low, high = (band - base).amin(dim=0), (band - base).amax(dim=0)
            axes.fill_between(steps, low, high, color="0.8", label=f"{EXACT}, all seeds")
            axes.grid(alpha=0.3)
        for name, by_seed in by_format.items():
            curves = {seed: smoothed(run.losses) for seed, run in by_seed.items()}
            upper.plot(steps, torch.stack(list(curves.values())).mean(dim=0), label=name, linewidth=1)
            away = torch.stack([curve - exact[seed] for seed, curve in curves.items()]).mean(dim=0)
            lower.plot(steps, away, linewidth=1)
        upper.set(title=model, ylabel=f"loss, mean of {SMOOTHED_STEPS} steps")
        lower.set(xlabel="step", ylabel=f"minus {EXACT}")
        upper.legend()
    figure.savefig(path, dpi=100)


# ---- the command line ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: list[str]
    formats: list[str]
    seeds: list[int]
    steps: int
    out: Path


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description="Train with compact moments and compare the losses.")
    add = parser.add_argument
    add("--model", nargs="+", choices=MODELS, default=list(MODELS), help="default: both")
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the moments (default: all)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    add("--steps", type=positive, default=500, help="of each run (default: %(default)s)")
    add("--out", type=Path, default=Path("out/convergence"), help="folder (default: %(default)s)")
    return Options(**vars(parser.parse_args(arguments)))


def run(options: Options) -> int:
    """Run what is missing, and write table and plot; return the exit status."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "losses.jsonl"
    finished = {found.key for found in read_runs(path)}
    for wanted in wanted_runs(options):
        if wanted.key not in finished:
            done = train(wanted)
            with path.open("a") as file:
                file.write(json.dumps(asdict(done)) + "\n")
            console.print(f"{done.model} {done.format} seed {done.seed}: final loss {done.final:.4f}")
    report([found for found in read_runs(path) if found.steps == options.steps], options.out)
    return 0


def report(runs: Sequence[Run], folder: Path) -> None:
    """Print the table, and write it and the plot."""
    rows = table_rows(runs)
    if not rows:
        console.print(f"no table and no plot: there is no run with {EXACT} to compare with")
        return
    table = markdown(rows)
    (folder / "table.md").write_text(table)
    print(table, end="")
    plot(runs, folder / "convergence.png")


def main() -> int:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return run(parse_options())
    except (PeftdsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
