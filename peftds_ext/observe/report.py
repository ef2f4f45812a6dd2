# SPDX-License-Identifier: Apache-2.0
"""Statistics as the few lines that a user reads."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ByteSize

from peftds_ext.observe.stats import OptimizerStats, Stats, StepStats, TierStats


def report(stats: Stats) -> str:
    """Return what bounds a step and how far it is from that, what was kept and what was moved."""
    return "\n".join(_lines(stats))


def _lines(stats: Stats) -> Iterator[str]:
    if stats.last_step is None:
        yield "no step has ended yet" if stats.optimizer is None else "no layers are streamed yet"
    else:
        yield from _step("last step", stats.last_step)
    if stats.steps > 1:
        yield from _step(f"{stats.steps} steps", stats.run)
    held, peak = _bytes(stats.host_bytes_held), _bytes(stats.host_bytes_peak)
    yield f"host memory: {held} of weights, {peak} at most, {_bytes(stats.pinned_bytes)} pinned"
    if stats.run.layers_used:
        per_use = stats.python_entries / stats.run.layers_used
        yield f"calls from Python: {stats.python_entries}, {per_use:.2f} per use of a layer"
    if stats.optimizer is not None:
        yield from _optimizer(stats.optimizer)


def _optimizer(optimizer: OptimizerStats) -> Iterator[str]:
    places = {"on the disk": optimizer.disk_bytes, "in memory": optimizer.memory_bytes}
    where = " and ".join(f"{_bytes(count)} {place}" for place, count in places.items() if count)
    yield f"optimizer states: {optimizer.form}; {where or 'none'}"
    step = optimizer.last_step
    if step is not None:
        moved = f"{_bytes(step.read_bytes)} read, {_bytes(step.written_bytes)} written"
        rate = f", {step.gb_per_s:.2f} GB/s" if step.gb_per_s else ""
        yield (
            f"  last step: {step.seconds:.3f} s, bound by {step.bound_by}; {moved}{rate}, "
            f"waited {step.waited_seconds:.3f} s"
        )


def _step(title: str, step: StepStats) -> Iterator[str]:
    yield f"{title}: {step.seconds:.3f} s, bound by {step.bound_by}; {_waiting(step)}"
    if step.layers_used:
        yield f"  layers: {_layers(step)}"
    for name, tier in step.tiers.items():
        yield f"  {name}: {_rate(tier)}"


def _waiting(step: StepStats) -> str:
    if not step.compute_waited_seconds:
        return "compute never waited"
    share = f", {step.compute_waited_seconds / step.seconds:.1%} of it" if step.seconds else ""
    without = max(0.0, step.seconds - step.compute_waited_seconds)
    return (
        f"compute waited {step.compute_waited_seconds:.3f} s for {step.waited_for}{share}: "
        f"{without:.3f} s without that"
    )


def _layers(step: StepStats) -> str:
    uses = f"{step.layers_used} uses, {step.layers_resident / step.layers_used:.1%} resident"
    if step.read_ahead_hit_rate is None:
        return f"{uses}, none was read"
    moved = step.layers_ready + step.layers_waited_for
    return f"{uses}, read ahead in time {step.layers_ready} of {moved} ({step.read_ahead_hit_rate:.1%})"


def _rate(tier: TierStats) -> str:
    if not tier.bytes:
        return "nothing was transferred"
    if tier.gb_per_s is None:
        return f"{_bytes(tier.bytes)} in no measurable time"
    return f"{_bytes(tier.bytes)} in {tier.seconds:.3f} s, {tier.gb_per_s:.2f} GB/s"


def _bytes(count: int) -> str:
    return ByteSize(count).human_readable(decimal=True)
