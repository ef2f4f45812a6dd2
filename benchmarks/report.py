# SPDX-License-Identifier: Apache-2.0
"""The table that a benchmark prints, and the same content for the JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from interleave import Comparison, Measure, NotMeasured, Ratio, Samples, compare

LEAST_ROUNDS = 7
"""Medians of fewer rounds are no result."""


@dataclass
class Report:
    """One race: its rows, its ratios, and what else a reader needs.

    ``bandwidths`` are the rows that measure the memory; rates are shown relative to the fastest of them.
    """

    title: str
    elements: int
    rounds: int
    samples: Samples
    measures: tuple[Measure, ...]
    comparisons: tuple[Comparison, ...]
    bandwidths: tuple[Measure, ...]
    notes: list[str] = field(default_factory=list)

    @property
    def is_miniature(self) -> bool:
        """Whether there are too few rounds for a result."""
        return self.rounds < LEAST_ROUNDS

    def seconds(self, measure: Measure) -> list[float]:
        """Return the samples of a row; raises NotMeasured."""
        return self.samples.seconds(measure.contender, measure.phases)

    def median(self, measure: Measure) -> float:
        """Return the median of a row in seconds; raises NotMeasured."""
        return self.samples.median(measure.contender, measure.phases)

    def rate(self, measure: Measure) -> float | None:
        """Return bytes per second by the row's own byte count; None where the row has none."""
        if measure.bytes_per_element is None:
            return None
        return measure.bytes_per_element * self.elements / self.median(measure)

    def bandwidth(self) -> float:
        """Return the highest measured rate of the memory in bytes per second; NaN if it is not measured."""
        return max((rate for rate in map(self.rate, self.bandwidths) if rate is not None), default=math.nan)

    def ratio(self, comparison: Comparison) -> Ratio:
        """Return the measured ratio; raises NotMeasured."""
        return compare(self.samples, comparison)

    def as_json(self) -> dict[str, Any]:
        """Return ratios, reasons and notes; the rows are pytest-benchmark's own entries."""
        ratios: list[dict[str, Any]] = []
        for comparison in self.comparisons:
            entry: dict[str, Any] = {"label": comparison.label, "target": comparison.target}
            try:
                ratio = self.ratio(comparison)
            except NotMeasured as reason:
                entry["not_measured"] = str(reason)
            else:
                entry |= {
                    "speed": ratio.speed,
                    "baseline": ratio.baseline.label,
                    "paired_quartiles": [ratio.paired_low, ratio.paired_high],
                }
            ratios.append(entry)
        return {
            "title": self.title,
            "elements": self.elements,
            "rounds": self.rounds,
            "is_miniature": self.is_miniature,
            "bandwidth_bytes_per_second": self.bandwidth(),
            "ratios": ratios,
            "not_measured": self.samples.not_measured,
            "notes": self.notes,
        }

    def lines(self) -> Iterator[str]:
        """Yield the table as text."""
        width = max(len(measure.label) for measure in self.measures)
        yield f"{self.title}: {self.elements:,} elements, medians of {self.rounds} alternating rounds"
        if self.is_miniature:
            yield f"fewer than {LEAST_ROUNDS} rounds: this shows that the benchmark runs, and nothing else"
        yield f"{'':{width}}  {'median ms':>10}  {'min':>9}  {'B/elem':>6}  {'GB/s':>6}  of best"
        for measure in self.measures:
            yield f"{measure.label:{width}}  {self._cells(measure)}"
        yield ""
        for comparison in self.comparisons:
            yield f"{comparison.label}: {self._verdict(comparison)}"
        yield from self.notes

    def _cells(self, measure: Measure) -> str:
        try:
            seconds = self.seconds(measure)
        except NotMeasured as reason:
            return f"not measured: {reason}"
        cells = f"{self.median(measure) * 1e3:10.3f}  {min(seconds) * 1e3:9.3f}"
        rate = self.rate(measure)
        if rate is None:
            return cells
        return f"{cells}  {measure.bytes_per_element:6.0f}  {rate / 1e9:6.1f}  {rate / self.bandwidth():7.0%}"

    def _verdict(self, comparison: Comparison) -> str:
        try:
            ratio = self.ratio(comparison)
        except NotMeasured as reason:
            return f"not measured: {reason}"
        target = "no target"
        if comparison.target is not None:
            verdict = "met" if ratio.speed >= comparison.target else "MISSED"
            target = f"target {comparison.target:.2f}x: {'no verdict' if self.is_miniature else verdict}"
        return (
            f"{ratio.speed:.2f}x {comparison.quantity} of {ratio.baseline.label} "
            f"(quartiles within rounds {ratio.paired_low:.2f} to {ratio.paired_high:.2f}; {target})"
        )
