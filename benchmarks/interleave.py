# SPDX-License-Identifier: Apache-2.0
"""Runs contenders round by round in turn, so that a change in the machine's speed meets all of them."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

Phases = dict[str, float]
"""Seconds by the name of a phase. Counts may stand beside them, where a contender makes any."""

SETTLE_S = 0.05
"""Pause before each run. GNU OpenMP's threads spin for about 10 ms after their work, and would take a core
from the next contender; what runs after the pause starts with all threads asleep."""


class NotMeasured(Exception):
    """A contender cannot run on this machine; the message is the reason that the table shows."""


@dataclass(frozen=True)
class Contender:
    """Something that does one unit of work per call of ``run`` and returns its seconds per phase."""

    name: str
    run: Callable[[], Phases]


@dataclass
class Samples:
    """What a race measured: per contender one :data:`Phases` a round, or the reason why not."""

    rounds: dict[str, list[Phases]] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str, phases: Sequence[str]) -> list[float]:
        """Return the sum of ``phases`` in each round.

        Raises:
            NotMeasured: the contender ``name`` did not run; with its reason.
        """
        if name in self.not_measured:
            raise NotMeasured(self.not_measured[name])
        return [sum(measured[phase] for phase in phases) for measured in self.rounds[name]]

    def median(self, name: str, phases: Sequence[str]) -> float:
        """Return the median over the rounds of :meth:`seconds`."""
        return statistics.median(self.seconds(name, phases))


def timed(steps: Mapping[str, Callable[[], object]]) -> Callable[[], Phases]:
    """Return a function that calls ``steps`` in order and returns the seconds of each."""

    def run() -> Phases:
        phases: Phases = {}
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            phases[name] = time.perf_counter() - start
        return phases

    return run


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def race(
    contenders: Sequence[Contender], *, rounds: int, warmup_rounds: int, settle_s: float = SETTLE_S
) -> Samples:
    """Run every contender once per round and return the samples of all rounds but the warm-up.

    The order is kept, and rotated by one place from round to round, so that nobody always runs after
    the same other one.
    """
    samples = Samples(rounds={contender.name: [] for contender in contenders})
    with _without_garbage_collection():
        for index in range(warmup_rounds + rounds):
            first = index % len(contenders) if contenders else 0
            for contender in itertools.chain(contenders[first:], contenders[:first]):
                time.sleep(settle_s)
                phases = contender.run()
                if index >= warmup_rounds:
                    samples.rounds[contender.name].append(phases)
    return samples


@dataclass(frozen=True)
class Measure:
    """One row of the table: the sum of some phases of one contender.

    ``bytes_per_element`` is the memory traffic that the work itself needs, read plus written; None
    where a rate has no meaning.
    """

    label: str
    contender: str
    phases: tuple[str, ...]
    bytes_per_element: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Speed of ``ours`` relative to the fastest of ``baselines``; ``target``: the least that is promised.

    ``quantity`` names what is compared where the measures are no times, but still the less the better.
    """

    label: str
    ours: Measure
    baselines: tuple[Measure, ...]
    target: float | None
    quantity: str = "the speed"


@dataclass(frozen=True)
class Ratio:
    """A comparison that was measured.

    ``speed`` is the median time of the fastest baseline divided by our median time: above 1, we are
    faster. ``paired_low`` and ``paired_high`` are the quartiles of the same ratio taken within rounds.
    """

    speed: float
    baseline: Measure
    paired_low: float
    paired_high: float


def compare(samples: Samples, comparison: Comparison) -> Ratio:
    """Evaluate ``comparison``.

    Raises:
        NotMeasured: ours or any of the baselines was not measured. The best of the remaining ones
            would not be the best.
    """

    def median(measure: Measure) -> float:
        return samples.median(measure.contender, measure.phases)

    ours = samples.seconds(comparison.ours.contender, comparison.ours.phases)
    best = min(comparison.baselines, key=median)
    baseline = samples.seconds(best.contender, best.phases)
    paired = [b / a for a, b in zip(ours, baseline, strict=True)]
    low, high = (min(paired), max(paired))
    if len(paired) >= 4:
        low, _, high = statistics.quantiles(paired, n=4, method="inclusive")
    return Ratio(median(best) / statistics.median(ours), best, low, high)


def collect(
    factories: Iterable[tuple[str, Callable[[], Contender]]],
) -> tuple[list[Contender], dict[str, str]]:
    """Build contenders; return those that can run, and the reasons of those that cannot."""
    ready: list[Contender] = []
    not_measured: dict[str, str] = {}
    for name, factory in factories:
        try:
            ready.append(factory())
        except NotMeasured as reason:
            not_measured[name] = str(reason)
    return ready, not_measured
