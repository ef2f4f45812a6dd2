# SPDX-License-Identifier: Apache-2.0
"""The tables of ``bench_optimizer.py``: one line per contender, with what it moves and what it keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from counted import OUTSIDE, READ, WRITTEN, counted
from interleave import NotMeasured, Samples
from report import LEAST_ROUNDS, Report

FIO = "fio"
"""The contender that moves as many bytes to the disk as from it, as fast as the disk can."""

MOVED = (counted("step", READ), counted("step", WRITTEN))
_LOGGED_BYTES = 1 << 16
"""What a process may write between rounds, for one to its log."""
_COLUMNS = (
    "backward ms", "step ms", "sum ms", "read B/el", "written", "GB/s", "of limit", "memory B/el", "disk",
)  # fmt: skip


def limit_of(contender: str) -> str:
    """Name what takes as long as the disk needs for the bytes that the step of ``contender`` moves."""
    return f"limit of {contender}"


def bytes_of(contender: str) -> str:
    """Name what counts the bytes that the step of ``contender`` moves."""
    return f"bytes of {contender}"


def derive(samples: Samples, contender: str, fio_bytes: int) -> None:
    """Add :func:`limit_of` and :func:`bytes_of` a contender; :data:`FIO` has moved ``fio_bytes`` a round."""
    limit, count = limit_of(contender), bytes_of(contender)
    try:
        moved = samples.seconds(contender, MOVED)
        if not all(moved):
            raise NotMeasured("no bytes were counted: the states are in memory, or in the page cache")
        samples.rounds[count] = [{"step": one} for one in moved]
    except NotMeasured as reason:
        samples.not_measured |= {limit: str(reason), count: str(reason)}
        return
    try:
        rates = [fio_bytes / seconds for seconds in samples.seconds(FIO, ("transfer",))]
    except NotMeasured as reason:
        samples.not_measured[limit] = str(reason)
    else:
        samples.rounds[limit] = [{"step": one / rate} for one, rate in zip(moved, rates, strict=True)]


def check_ended(samples: Samples, contenders: Iterable[str]) -> None:
    """Make sure that steps have done their work when they return, so that their time is the time of the work.

    Raises:
        ArithmeticError: more than a tenth of what a contender moves is moved between its rounds.
    """
    for name in contenders:
        outside = samples.median(name, (OUTSIDE,))
        moved = samples.median(name, (OUTSIDE, *MOVED))
        if outside > max(moved / 10, _LOGGED_BYTES):
            raise ArithmeticError(
                f"{name}: {outside:.0f} of {moved:.0f} bytes move between its rounds: its step goes on "
                "after it has returned, and its time must not be compared"
            )


@dataclass
class OptimizerReport(Report):
    """A race of optimizers.

    ``rows``: labels by contender; ``state_bytes``: what our optimizers say they keep, in ``"memory"`` and on
    ``"disk"``.
    """

    rows: dict[str, str] = field(default_factory=dict)
    state_bytes: dict[str, dict[str, int]] = field(default_factory=dict)

    def figures(self, name: str) -> dict[str, float | None]:
        """Return a contender's line by column: medians, bytes per element; None where there is nothing.

        Raises:
            NotMeasured: the contender did not run.
        """
        backward, step = self._phase(name, "backward"), self._phase(name, "step")
        read, written = (self._per_element(self._phase(name, direction)) for direction in MOVED)
        both = None if backward is None or step is None else self.samples.median(name, ("backward", "step"))
        moved, rate, of_limit = (read or 0.0) + (written or 0.0), None, None
        if step is not None and moved:
            rate = moved * self.elements / step / 1e9
            limits = self.samples.rounds.get(limit_of(name))
            of_limit = step / self.samples.median(limit_of(name), ("step",)) if limits else None
        kept = self.state_bytes.get(name, {})
        memory, disk = (self._per_element(kept.get(place)) for place in ("memory", "disk"))
        times = [None if seconds is None else seconds * 1e3 for seconds in (backward, step, both)]
        return dict(zip(_COLUMNS, (*times, read, written, rate, of_limit, memory, disk), strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`Report.as_json` does, and the line of each contender that was measured."""
        rows = [
            {"label": label, **self.figures(name)}
            for name, label in self.rows.items()
            if name in self.samples.rounds
        ]
        return {**super().as_json(), "rows": rows}

    def lines(self) -> Iterator[str]:
        """Yield the table as text."""
        width = max(map(len, self.rows.values()))
        yield f"{self.title}: {self.elements:,} elements, medians of {self.rounds} alternating rounds"
        if self.is_miniature:
            yield f"fewer than {LEAST_ROUNDS} rounds: this shows that the benchmark runs, and nothing else"
        yield f"{'':{width}}  {'  '.join(_COLUMNS)}"
        for name, label in self.rows.items():
            yield f"{label:{width}}  {self._line(name)}"
        yield ""
        for comparison in self.comparisons:
            yield f"{comparison.label}: {self._verdict(comparison)}"
        yield from self._elsewhere()
        yield from self.notes

    def _line(self, name: str) -> str:
        try:
            figures = self.figures(name)
        except NotMeasured as reason:
            return f"not measured: {reason}"
        cells = {column: "-" if value is None else f"{value:.2f}" for column, value in figures.items()}
        return "  ".join(f"{cell:>{len(column)}}" for column, cell in cells.items())

    def _elsewhere(self) -> Iterator[str]:
        """Tell of bytes that moved while no step was timed."""
        for name, label in self.rows.items():
            for phase, when in (
                (counted("forward", READ), "read in forward"),
                (counted("forward", WRITTEN), "written in forward"),
                (counted("backward", READ), "read in backward"),
                (counted("backward", WRITTEN), "written in backward"),
                (OUTSIDE, "moved between two rounds"),
            ):
                found = self._phase(name, phase) if name in self.samples.rounds else None
                if found:
                    yield f"{label}: {found / self.elements:.2f} B/el {when}"

    def _phase(self, name: str, phase: str) -> float | None:
        if name in self.samples.rounds and any(phase not in taken for taken in self.samples.rounds[name]):
            return None
        return self.samples.median(name, (phase,))

    def _per_element(self, count: float | None) -> float | None:
        return None if count is None else count / self.elements
