# SPDX-License-Identifier: Apache-2.0
"""The table of ``bench_io.py``: rates with quartiles, processor seconds and system calls per GB."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from interleave import Measure, NotMeasured
from report import LEAST_ROUNDS, Report

GB = 1e9


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile; of fewer than four values the least and the greatest."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass
class IoReport(Report):
    """A race over transfers of ``elements`` bytes, one byte per element.

    ``calls_per_gb``: system calls by contender, or why they were not counted. Contenders that are left out
    make none worth counting. ``checksums``: rows that take the checksums of what ``read`` has read.
    """

    calls_per_gb: dict[str, float | str] = field(default_factory=dict)
    read: Measure | None = None
    checksums: tuple[Measure, ...] = ()

    def bandwidth(self) -> float:
        """Return the highest rate of any transfer, in bytes per second."""
        rows = [row for row in self.measures if row.contender in self.samples.rounds]
        return max(rate for rate in map(self.rate, rows) if rate is not None)

    def cpu_per_gb(self, measure: Measure) -> float:
        """Return the median of the processor seconds per GB; raises NotMeasured."""
        return self.samples.median(measure.contender, ("cpu",)) * GB / self.elements

    def checksum_shares(self) -> dict[str, float | str]:
        """Return the time of each row of ``checksums`` by that of the read, or why there is none."""
        shares: dict[str, float | str] = {}
        for row in self.checksums:
            try:
                if self.read is None:
                    raise NotMeasured("there is no read to compare with")
                shares[row.label] = self.median(row) / self.median(self.read)
            except NotMeasured as reason:
                shares[row.label] = str(reason)
        return shares

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`Report.as_json` does, and all figures of each row that was measured."""
        rows = [self._row(row) for row in self.measures if row.contender in self.samples.rounds]
        return {**super().as_json(), "rows": rows, "checksums_by_read": self.checksum_shares()}

    def lines(self) -> Iterator[str]:
        """Yield the table as text."""
        width = max(len(measure.label) for measure in self.measures)
        yield f"{self.title}: {self.elements:,} bytes, medians of {self.rounds} alternating rounds"
        if self.is_miniature:
            yield f"fewer than {LEAST_ROUNDS} rounds: this shows that the benchmark runs, and nothing else"
        yield f"{'':{width}}  {'GB/s':>6}  {'quartiles':>14}  {'CPU s/GB':>8}  calls/GB"
        for measure in self.measures:
            yield f"{measure.label:{width}}  {self._figures(measure)}"
        yield ""
        for comparison in self.comparisons:
            yield f"{comparison.label}: {self._verdict(comparison)}"
        for label, share in self.checksum_shares().items():
            told = f"not measured: {share}" if isinstance(share, str) else f"{share:.1%} of the read's time"
            yield f"{label}: {told}"
        for reason in sorted({calls for calls in self.calls_per_gb.values() if isinstance(calls, str)}):
            yield f"system calls not counted: {reason}"
        yield from self.notes

    def _row(self, measure: Measure) -> dict[str, Any]:
        slow, fast = self._rates(measure)
        calls = self.calls_per_gb.get(measure.contender)
        return {
            "label": measure.label,
            "bytes_per_second": self.rate(measure),
            "bytes_per_second_quartiles": [slow, fast],
            "cpu_seconds_per_gb": self.cpu_per_gb(measure),
            "system_calls_per_gb": None if isinstance(calls, str) else calls,
        }

    def _rates(self, measure: Measure) -> tuple[float, float]:
        return quartiles([self.elements / seconds for seconds in self.seconds(measure)])

    def _figures(self, measure: Measure) -> str:
        try:
            rate = self.elements / self.median(measure)
        except NotMeasured as reason:
            return f"not measured: {reason}"
        slow, fast = (f"{value / GB:.2f}" for value in self._rates(measure))
        calls = self.calls_per_gb.get(measure.contender, "")
        counted = f"{calls:8.0f}" if isinstance(calls, float) else f"{'-':>8}"
        return f"{rate / GB:6.2f}  {f'{slow} to {fast}':>14}  {self.cpu_per_gb(measure):8.4f}  {counted}"
