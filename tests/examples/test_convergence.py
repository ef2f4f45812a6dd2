# SPDX-License-Identifier: Apache-2.0
"""The comparison of formats of moments: the same batches for all, an honest table, no run done twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import convergence

from peftds_ext.errors import CorruptDataError


def made_run(name: str, seed: int, final: float, *, model: str = "llama", steps: int = 60) -> convergence.Run:
    """A run whose last losses are ``final``, after larger ones that must not count."""
    return convergence.Run(model, name, seed, steps, (9.0,) * (steps - 50) + (final,) * 50)


EXACT_RUNS = [made_run("fp32", seed, final) for seed, final in enumerate((2.0, 2.2, 2.1))]


def test_every_row_of_the_text_comes_once_before_any_comes_again() -> None:
    pieces = torch.arange(103)
    batches = [convergence.rows_of(pieces, 5, 4, step) for step in range(10)]
    for start in (0, 5):
        seen = torch.cat(batches[start : start + 5]).sort(dim=0).values
        assert torch.equal(seen.flatten(), torch.arange(100))
    assert not torch.equal(torch.cat(batches[:5]), torch.cat(batches[5:]))
    assert torch.equal(batches[7], convergence.rows_of(pieces, 5, 4, 7))


@pytest.mark.parametrize(("model", "vocabulary"), [("minilm", 30522), ("llama", 3170)])
def test_data_depend_on_the_step_alone_and_weights_on_the_seed(model: str, vocabulary: int) -> None:
    def losses(seed: int, *steps: int) -> list[float]:
        torch.manual_seed(seed)
        problem = convergence.MODELS[model]()
        problem.module.eval()  # no dropout
        with torch.no_grad():
            return [problem.loss(step).item() for step in steps]

    third, fourth = losses(0, 3, 4)
    assert third == pytest.approx(math.log(vocabulary), rel=0.3)
    assert fourth != third
    assert losses(0, 3) == [third]
    assert losses(1, 3) != [third]


def test_the_table_compares_equal_seeds_and_counts_what_ends_too_high() -> None:
    runs = [
        *EXACT_RUNS,
        made_run("bf16", 0, 2.05),
        made_run("bf16", 2, 2.25),
        made_run("bf16", 7, 0.0),  # no fp32 run of this seed
        made_run("int8", 1, 1.9),
        made_run("fp32", 0, 5.0, model="minilm"),
    ]
    other, exact, bf16, int8 = convergence.table_rows(runs)
    assert (other.model, other.final, other.spread) == ("minilm", 5.0, (5.0, 5.0))
    assert (exact.format, exact.seeds, exact.not_above, exact.change) == ("fp32", 3, 3, 0.0)
    assert exact.final == pytest.approx(2.1)
    assert exact.spread == pytest.approx((2.0, 2.2))
    assert (bf16.format, bf16.seeds, bf16.not_above) == ("bf16", 2, 1)
    assert bf16.final == pytest.approx(2.15)
    assert bf16.change == pytest.approx((0.05 + 0.15) / 2)
    assert (int8.format, int8.seeds, int8.not_above) == ("int8", 1, 1)
    assert int8.change == pytest.approx(1.9 - 2.2)
    last = convergence.markdown([exact, bf16]).splitlines()[-1]
    assert last == "| llama | bf16 | 2 | 2.1500 | +0.1000 | 2.0000 to 2.2000 | 1 of 2 |"


def test_smoothing_averages_neighbours() -> None:
    losses = [float(number) for number in range(30)]
    assert convergence.smoothed(losses).tolist() == [12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    assert convergence.smoothed(losses[:4]).tolist() == [1.5]


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    convergence.plot([*EXACT_RUNS, made_run("int8", 1, 2.0)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_runs_are_trained_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trained: list[tuple[str, str, int, int]] = []
    train = convergence.train

    def counted(run: convergence.Run) -> convergence.Run:
        trained.append(run.key)
        return train(run)

    monkeypatch.setattr(convergence, "train", counted)

    def call(*formats: str) -> None:
        arguments = ["--model", "llama", "--seeds", "0", "--steps", "6", "--out", str(tmp_path)]
        assert convergence.run(convergence.parse_options([*arguments, "--formats", *formats])) == 0

    call("int8")
    assert "no run with fp32" in capsys.readouterr().out
    assert not (tmp_path / "table.md").exists()
    call(*convergence.FORMATS)
    assert sorted(trained) == sorted(("llama", name, 0, 6) for name in convergence.FORMATS)
    call("fp32")
    assert len(trained) == len(convergence.FORMATS)
    assert capsys.readouterr().out.count("| llama |") == 2 * len(convergence.FORMATS)
    assert (tmp_path / "table.md").read_text().count("| llama |") == len(convergence.FORMATS)
    assert (tmp_path / "convergence.png").is_file()

    losses = {run.format: run.losses for run in convergence.read_runs(tmp_path / "losses.jsonl")}
    exact = losses["fp32"]
    assert exact[-1] < exact[0] - 0.05, "it must learn"
    for name, found in losses.items():
        assert found[0] == exact[0], "the first loss comes before any step"
        assert found == pytest.approx(exact, rel=0.02)
        assert name == "fp32" or found != exact
    assert len(set(losses.values())) == len(losses), "each format leads elsewhere"


@pytest.mark.parametrize("line", ["{", "3", '{"model": "llama"}', '{"losses": [1.0], "colour": "red"}'])
def test_a_damaged_record_is_told_with_its_line(tmp_path: Path, line: str) -> None:
    good: dict[str, Any] = {"model": "llama", "format": "fp32", "seed": 0, "steps": 1, "losses": [1.0]}
    path = tmp_path / "losses.jsonl"
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(CorruptDataError, match=r"losses\.jsonl, line 2, .* Delete the line"):
        convergence.read_runs(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "not a positive number"),
        (["--formats", "fp8"], "invalid choice: 'fp8'"),
        (["--model", "bert"], "invalid choice: 'bert'"),
    ],
)
def test_bad_options_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convergence.parse_options(arguments)
    assert message in capsys.readouterr().err


def test_the_first_seed_of_everything_is_trained_first() -> None:
    runs = list(convergence.wanted_runs(convergence.parse_options([])))
    assert [run.seed for run in runs] == [0] * 10 + [1] * 10 + [2] * 10
    assert len({run.key for run in runs}) == 30
