# SPDX-License-Identifier: Apache-2.0
"""The rules that the benchmarks rest on: alternation, best baseline, same work, replayed samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


def contender(name: str, seconds: float, log: list[str]) -> Any:
    from interleave import Contender

    def run() -> dict[str, float]:
        log.append(name)
        return {"a": seconds, "b": 2 * seconds}

    return Contender(name, run)


def samples(**seconds: list[float]) -> Any:
    from interleave import Samples

    return Samples(rounds={name: [{"a": value} for value in values] for name, values in seconds.items()})


def measure(name: str) -> Any:
    from interleave import Measure

    return Measure(name, name, ("a",), 8)


def test_race_alternates_rotates_and_drops_the_warmup() -> None:
    from interleave import race

    log: list[str] = []
    contenders = [contender(name, 1.0, log) for name in "xyz"]
    result = race(contenders, rounds=3, warmup_rounds=1, settle_s=0.0)
    assert "".join(log) == "xyz" + "yzx" + "zxy" + "xyz"
    assert {name: len(rounds) for name, rounds in result.rounds.items()} == {"x": 3, "y": 3, "z": 3}
    assert result.seconds("x", ("a", "b")) == [3.0, 3.0, 3.0]


def test_race_restores_garbage_collection_when_a_contender_fails() -> None:
    import gc

    from interleave import Contender, race

    def fail() -> dict[str, float]:
        assert not gc.isenabled()
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        race([Contender("bad", fail)], rounds=1, warmup_rounds=0, settle_s=0.0)
    assert gc.isenabled()


def test_ratio_is_against_the_fastest_baseline() -> None:
    from interleave import Comparison, compare

    taken = samples(ours=[2.0, 2.0, 2.0], slow=[9.0, 9.0, 1.0], fast=[3.0, 3.0, 30.0])
    ratio = compare(taken, Comparison("", measure("ours"), (measure("slow"), measure("fast")), target=1.0))
    assert ratio.baseline == measure("fast")
    assert ratio.speed == pytest.approx(1.5)
    assert [ratio.paired_low, ratio.paired_high] == pytest.approx([1.5, 15.0])


def test_no_ratio_while_a_baseline_is_missing() -> None:
    from interleave import Comparison, NotMeasured, compare

    taken = samples(ours=[2.0], fast=[3.0])
    taken.not_measured["other"] = "no compiler"
    with pytest.raises(NotMeasured, match="no compiler"):
        compare(taken, Comparison("", measure("ours"), (measure("fast"), measure("other")), target=1.0))


def test_collect_keeps_the_reason() -> None:
    from interleave import NotMeasured, collect

    def missing() -> Any:
        raise NotMeasured("not installed")

    def broken() -> Any:
        raise ValueError("a bug, not an absence")

    ready, reasons = collect([("a", lambda: contender("a", 1.0, [])), ("b", missing)])
    assert [one.name for one in ready] == ["a"]
    assert reasons == {"b": "not installed"}
    with pytest.raises(ValueError, match="a bug"):
        collect([("c", broken)])


def report(taken: Any, rounds: int, target: float | None) -> Any:
    from interleave import Comparison
    from report import Report

    ours, base, memory = (measure(name) for name in ("ours", "base", "memory"))
    comparison = Comparison("ratio", ours, (base,), target)
    return Report("title", 1000, rounds, taken, (ours, base, memory), (comparison,), (memory,))


@pytest.mark.parametrize(
    ("rounds", "target", "verdict"),
    [
        (7, 1.9, "target 1.90x: met"),
        (7, 2.1, "target 2.10x: MISSED"),
        (6, 1.9, "target 1.90x: no verdict"),
        (7, None, "no target"),
    ],
)
def test_table_judges_only_real_results(rounds: int, target: float | None, verdict: str) -> None:
    taken = samples(ours=[1.0] * rounds, base=[2.0] * rounds, memory=[0.5] * rounds)
    lines = list(report(taken, rounds, target).lines())
    (line,) = [line for line in lines if line.startswith("ratio: ")]
    assert line.endswith(f"; {verdict})")
    assert "2.00x" in line


def test_table_shows_what_was_not_measured() -> None:
    taken = samples(ours=[1.0] * 7, memory=[0.5] * 7)
    taken.not_measured["base"] = "no such op"
    shown = report(taken, 7, 1.0)
    lines = list(shown.lines())
    assert "base    not measured: no such op" in lines
    assert "ratio: not measured: no such op" in lines
    assert shown.as_json()["ratios"] == [{"label": "ratio", "target": 1.0, "not_measured": "no such op"}]


def test_rates_are_relative_to_the_memory() -> None:
    taken = samples(ours=[1.0] * 7, base=[2.0] * 7, memory=[0.5] * 7)
    shown = report(taken, 7, 1.0)
    assert shown.rate(measure("ours")) == pytest.approx(8 * 1000 / 1.0)
    assert shown.bandwidth() == pytest.approx(8 * 1000 / 0.5)


def test_agreement_is_relative_to_the_way_gone() -> None:
    from agreement import check_agreement

    start = torch.full((100,), 1000.0)
    reference = start + 1.0
    assert check_agreement("same", reference.clone(), reference, start, tolerance=0.0) == 0.0
    assert check_agreement("near", start + 1.001, reference, start, tolerance=2e-3) > 0.0
    for other in (start, start + 1.01, start * float("nan")):
        with pytest.raises(ArithmeticError, match="must not be compared"):
            check_agreement("off", other, reference, start, tolerance=2e-3)
    with pytest.raises(ArithmeticError, match="has not moved"):
        check_agreement("still", start, start, start, tolerance=1.0)


def test_check_equal_counts_what_differs() -> None:
    from agreement import check_equal

    expected = torch.zeros(5)
    check_equal("same", torch.zeros(5), expected)
    with pytest.raises(ArithmeticError, match="1 of 5"):
        check_equal("off", torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), expected)


def test_replay_gives_the_samples_back() -> None:
    from replay import recorded_clock, replay

    advance: Callable[[], None] = replay([0.25, 0.5])
    laps = []
    for _ in range(2):
        start = recorded_clock()
        advance()
        laps.append(recorded_clock() - start)
    assert laps == pytest.approx([0.25, 0.5])
