# SPDX-License-Identifier: Apache-2.0
"""Statistics of a run, as models that are also JSON, and the report that a user reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

COMPUTE_BOUND_SHARE: Final = 0.05
"""A step is bound by compute while compute waits for less than this share of it."""

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TierStats(BaseModel):
    """What came from one tier, such as the disk."""

    model_config = ConfigDict(frozen=True)

    bytes: Count
    """Bytes that were transferred."""

    seconds: Seconds
    """Seconds in which at least one transfer was submitted and not finished yet: see :func:`union_length`."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes per second; 0 if nothing was transferred, None if that took no time."""
        if not self.bytes:
            return 0.0
        return self.bytes / 1e9 / self.seconds if self.seconds else None


class StepStats(BaseModel):
    """One step, or several together. A layer that is used twice, forward and backward, counts twice."""

    model_config = ConfigDict(frozen=True)

    seconds: Seconds
    """Wall time in seconds."""

    compute_waited_seconds: Seconds
    """Seconds of it in which compute stood still because a layer was not there."""

    waited_for: Literal["disk", "decode", "copies"] = "disk"
    """What compute waited for, or most of the time did."""

    layers_used: Count
    """Uses of layers: the sum of the next three."""

    layers_resident: Count
    """Uses without a transfer: the layer was in memory since an earlier use."""

    layers_ready: Count
    """Uses of a layer that was read ahead in time."""

    layers_waited_for: Count
    """Uses of a layer whose transfer had not finished."""

    tiers: Mapping[str, TierStats] = Field(default_factory=dict)
    """By tier: ``"disk"``, and on a GPU ``"copies"`` from host memory."""

    @model_validator(mode="after")
    def _check_sum(self) -> StepStats:
        parts = self.layers_resident + self.layers_ready + self.layers_waited_for
        if parts != self.layers_used:
            raise ValueError(f"layers_used is {self.layers_used}, but its parts make {parts}")
        return self

    @computed_field  # type: ignore[prop-decorator]
    @property
    def read_ahead_hit_rate(self) -> float | None:
        """Share, 0 to 1, of transferred layers that were there in time; None if none was transferred."""
        return _share(self.layers_ready, self.layers_ready + self.layers_waited_for)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def resident_share(self) -> float | None:
        """Share, 0 to 1, of uses without a transfer; None if no layer was used."""
        return _share(self.layers_resident, self.layers_used)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bound_by(self) -> Literal["compute", "disk", "decode", "copies"]:
        """What a faster step would need more of: compute, if it hardly waited, else what it waited for."""
        waited = self.compute_waited_seconds
        return "compute" if not waited or waited < COMPUTE_BOUND_SHARE * self.seconds else self.waited_for


class OptimizerStep(BaseModel):
    """The optimizer's part of one step whose states are stored."""

    model_config = ConfigDict(frozen=True)

    seconds: Seconds
    """Seconds from the first chunk to the last; it may overlap the next forward (``optimizer.overlap``)."""

    waited_seconds: Seconds
    """Seconds of it in which the update stood still for a chunk that was not read or written yet."""

    read_bytes: Count
    written_bytes: Count

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes per second, read and written together; None if that took no time."""
        return TierStats(bytes=self.read_bytes + self.written_bytes, seconds=self.seconds).gb_per_s

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bound_by(self) -> Literal["compute", "disk"]:
        """What a faster step would need more of."""
        waited = self.waited_seconds
        return "compute" if not waited or waited < COMPUTE_BOUND_SHARE * self.seconds else "disk"


class OptimizerStats(BaseModel):
    """Masters and moments that are stored elsewhere or otherwise than DeepSpeed has them."""

    model_config = ConfigDict(frozen=True)

    form: str
    """How many elements are kept in which form."""

    memory_bytes: Count
    disk_bytes: Count
    steps: Count

    last_step: OptimizerStep | None
    """None before the first step has ended."""


class Stats(BaseModel):
    """A run up to now."""

    model_config = ConfigDict(frozen=True)

    last_step: StepStats | None
    """None before the first step has ended."""

    run: StepStats
    """All steps together."""

    steps: Count
    """Steps that have ended."""

    host_bytes_held: Count
    """Bytes of weights in host memory now."""

    host_bytes_peak: Count
    """The most bytes that were there at once."""

    pinned_bytes: Count
    """Bytes of this process that the system may not move: locked, or registered for transfers."""

    python_entries: Count
    """Calls from Python into the engine."""

    optimizer: OptimizerStats | None = None
    """The optimizer's states; None where they are as DeepSpeed has them."""

    def __str__(self) -> str:
        """Return the report that a user reads."""
        from peftds_ext.observe.report import report

        return report(self)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def pinned_bytes() -> int:
    """Return the bytes of this process that are pinned or locked (VmPin, VmLck: proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) * 1024 for name in ("VmPin", "VmLck"))


def union_length(intervals: Iterable[tuple[int, int]]) -> int:
    """Return how much the intervals ``[start, end)`` cover together; what lies in several counts once."""
    covered, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        if end > begin:
            covered, reached = covered + end - begin, end
    return covered
