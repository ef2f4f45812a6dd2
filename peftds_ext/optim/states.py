# SPDX-License-Identifier: Apache-2.0
"""The states of one Adam optimizer: stepped where they are stored, and lent as plain fp32 tensors.

Whoever needs whole tensors (a checkpoint, a caller that sets a moment, a step by other code) borrows
a group, and gives it back with or without its changes. What is stored is exact for fp32 and for every master;
moments in bf16 and int8 are lent as what they stand for, and rounded to nearest when they come back changed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from peftds_ext import ops
from peftds_ext.errors import StateLostError
from peftds_ext.observe.stats import OptimizerStats, OptimizerStep
from peftds_ext.optim.formats import dequantize_moment, join_master, quantize_moment, split_master
from peftds_ext.optim.state_format import StateFormat
from peftds_ext.optim.state_store import Chunk, StateGroup, StateStore, Traffic

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class _Group:
    """What is known of a group beside its stored arrays."""

    stored: StateGroup
    weights: Callable[[], Tensor] | None
    """The low-precision weights, flat and in host memory, where masters are not whole without them."""
    step: int = 0


class OptimizerStates:
    """Masters and moments of groups of parameters, numbered from 0 in the order of their steps."""

    def __init__(self, store: StateStore) -> None:
        """Keep the states in ``store``, which is closed with them."""
        self._store = store
        self._groups: list[_Group] = []
        self._sweep: Iterator[Chunk] | None = None
        self._next = 0
        self._lost = ""
        self._began = 0.0, Traffic()
        self._last: OptimizerStep | None = None
        self._steps = 0
        self.checkpoint: str | None = None
        """The checkpoint that was saved or loaded last, to be named if the states are lost."""

    def add(self, numel: int, form: StateFormat, weights: Callable[[], Tensor] | None = None) -> int:
        """Take room for a group of ``numel`` elements and return its number.

        Args:
            numel: elements of the group.
            form: the form of its states.
            weights: returns its bf16 (split) or fp32 weights, flat, in the same host memory each time.

        Raises:
            StorageFullError: there is no room.
        """
        if form.needs_weights and weights is None:
            raise ValueError(f"{form} are not whole without the weights")
        group = StateGroup(f"group{len(self._groups)}", numel, form)
        self._store.add(group)
        self._groups.append(_Group(group, weights))
        return len(self._groups) - 1

    def __len__(self) -> int:
        return len(self._groups)

    def format(self, group: int) -> StateFormat:
        """Return the form of a group's states."""
        return self._groups[group].stored.format

    def describe(self) -> str:
        """Say how many elements are kept in which form."""
        by_format: dict[StateFormat, int] = {}
        for group in self._groups:
            by_format[group.stored.format] = by_format.get(group.stored.format, 0) + group.stored.numel
        return "; ".join(f"{numel:,} elements as {form}" for form, numel in by_format.items())

    def usage(self) -> dict[str, int]:
        """Return the bytes of states in ``"memory"`` and on ``"disk"``."""
        return self._store.usage()

    def stats(self) -> OptimizerStats:
        """Return where the states are, and what the last step transferred."""
        usage = self._store.usage()
        return OptimizerStats(
            form=self.describe(),
            memory_bytes=usage["memory"],
            disk_bytes=usage["disk"],
            steps=self._steps,
            last_step=self._last,
        )

    def close(self) -> None:
        """Give memory and files back. Idempotent."""
        self._sweep = None
        self._store.close()

    # -- the step -------------------------------------------------------------------------------------

    def step(
        self,
        group: int,
        grad: Tensor,
        out: Tensor | None,
        settings: Mapping[str, Any],
        done: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Step one group; to be called for all groups in their order.

        The states of the following groups are read meanwhile, and those of this one may still be on their
        way to the disk afterwards. They are there when the last group has been stepped.

        Args:
            group: its number.
            grad: flat gradient in host memory, fp32, bf16 or fp16.
            out: receives the weights in their dtype, unless they are part of the master.
            settings: keyword arguments of :func:`peftds_ext.ops.adamw_step_`, without ``step``.
            done: is told of how many elements the weights are new, from the first one, as they come to be.

        Raises:
            StateLostError: a transfer failed when something had been stepped already, now or earlier.
            StorageError: a transfer failed before anything was changed.
        """
        self._check_turn(group)
        this = self._groups[group]
        started = group > 0
        try:
            if self._sweep is None:
                self._began = time.monotonic(), self._store.traffic()
                self._sweep = self._store.sweep([g.stored for g in self._groups])
            for chunk in itertools.islice(self._sweep, self._store.chunk_count(this.stored)):
                started = True
                _step_chunk(chunk, this, grad, out, {**settings, "step": this.step + 1})
                done(chunk.stop)
            this.step += 1
            self._next = group + 1
            if self._next == len(self._groups):
                self._finish()
        except BaseException as error:
            if started:
                self.lose(error)
            self._sweep, self._next = None, 0
            raise

    def _check_turn(self, group: int) -> None:
        if group == self._next:
            self.check_whole(in_step=group > 0)
        else:  # of which check_whole tells if it is left over from a step that never ended
            self.check_whole()
            raise ValueError(f"group {group} is stepped, and it is the turn of group {self._next}")

    def _finish(self) -> None:
        """Wait for what the sweep still writes."""
        assert self._sweep is not None
        for _ in self._sweep:
            raise RuntimeError("a sweep has more chunks than its groups")
        self._sweep, self._next = None, 0
        began, before = self._began
        moved = self._store.traffic() - before
        self._last = OptimizerStep(seconds=time.monotonic() - began, **asdict(moved))
        self._steps += 1

    def check_whole(self, *, in_step: bool = False) -> None:
        """Raise what is wrong with the states, if anything is.

        Raises:
            StateLostError: an earlier step failed half-way, or was broken off between two groups (``in_step``
                says that it is still going on).
        """
        if self._sweep is not None and not in_step:
            broken_off = InterruptedError("it was broken off between two groups")
            self._sweep, self._next = None, 0
            self.lose(broken_off)
        if self._lost:
            raise StateLostError(self._lost)

    def lose(self, error: BaseException) -> None:
        """Let every later use of the states be refused, since a step failed half-way.

        Raises:
            StateLostError: unless ``error`` is something like Ctrl-C, which the caller raises.
        """
        if self._lost:
            return
        last = f"resume from {self.checkpoint}" if self.checkpoint else "no checkpoint was made in this run"
        self._lost = (
            "the optimizer's states are lost, since a step failed when part of it was done; "
            f"{last}. What failed: {str(error) or type(error).__name__}"
        )
        self._sweep, self._next = None, 0
        if isinstance(error, Exception):
            raise StateLostError(self._lost) from error

    # -- whole tensors --------------------------------------------------------------------------------

    def initialize(self, group: int, source: Tensor) -> None:
        """Set the masters to the values of ``source``, of any dtype and device, and the moments to zero.

        Raises:
            StorageError: a transfer failed.
        """
        this = self._groups[group]
        for chunk in self._store.sweep([this.stored], read=False):
            _write_master(chunk, this, source[chunk.start : chunk.stop])
            for name in MOMENTS:
                _write_moment(chunk, name, torch.zeros(chunk.stop - chunk.start))
        this.step = 0

    def set_master(self, group: int, source: Tensor) -> None:
        """Set the masters to the values of ``source``, of any dtype and device; the moments stay.

        Raises:
            StateLostError: a transfer failed, now or in an earlier step.
        """
        self.check_whole()
        self.take_back(group, {"master": source})

    def read(self, group: int, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements ``start`` to ``stop`` of ``"master"`` or a moment in fp32 memory of their own.

        Raises:
            StateLostError: an earlier step failed half-way.
            StorageError: a transfer failed.
        """
        this = self._groups[group]
        stop = this.stored.numel if stop is None else stop
        found = torch.empty(stop - start)
        self._copy(group, {name: found}, range(start, stop))
        return found

    def lend(self, group: int, names: Sequence[str] = ("master", *MOMENTS)) -> dict[str, Tensor]:
        """Return copies of a group's states, flat fp32 tensors by name.

        Raises:
            StateLostError: an earlier step failed half-way.
            StorageError: a transfer failed (StorageFullError: there is no room for copies).
        """
        numel = self._groups[group].stored.numel
        tensors = {name: self._store.scratch(numel) for name in names}
        self._copy(group, tensors, range(numel))
        return tensors

    def take_back(self, group: int, lent: Mapping[str, Tensor]) -> None:
        """Store what was lent, and changed; what is not among it stays.

        Raises:
            StateLostError: a transfer failed; a part is stored.
        """
        this = self._groups[group]
        try:
            for chunk in self._store.sweep([this.stored], read=len(lent) < 1 + len(MOMENTS)):
                part = slice(chunk.start, chunk.stop)
                for name, values in lent.items():
                    if name == "master":
                        _write_master(chunk, this, values[part])
                    else:
                        _write_moment(chunk, name, values[part])
        except BaseException as error:
            self.lose(error)
            raise

    def steps(self, group: int) -> int:
        """Return how many steps a group has made."""
        return self._groups[group].step

    def set_steps(self, group: int, step: int) -> None:
        """Let the next step of a group be number ``step + 1``."""
        self._groups[group].step = step

    def _copy(self, group: int, into: Mapping[str, Tensor], elements: range) -> None:
        self.check_whole()
        this = self._groups[group]
        for chunk in self._store.sweep([this.stored], write=False, within=elements):
            low, high = max(chunk.start, elements.start), min(chunk.stop, elements.stop)
            for name, target in into.items():
                whole = _master(chunk, this) if name == "master" else _moment(chunk, name)
                to = slice(low - elements.start, high - elements.start)
                target[to] = whole[low - chunk.start : high - chunk.start]

    # -- stored arrays, bit for bit -------------------------------------------------------------------

    def save_codes(self, group: int) -> dict[str, Tensor]:
        """Return copies of the moments as they are stored, so that a run can go on with the same bits.

        Raises:
            StateLostError: an earlier step failed half-way.
            StorageError: a transfer failed.
        """
        self.check_whole()
        parts: dict[str, list[Tensor]] = {}
        for chunk in self._store.sweep([self._groups[group].stored], write=False):
            for name, array in chunk.arrays.items():
                if name != "master":
                    parts.setdefault(name, []).append(array.clone())
        return {name: torch.cat(found) for name, found in parts.items()}

    def load_codes(self, group: int, codes: Mapping[str, Tensor]) -> None:
        """Store what :meth:`save_codes` returned, from a group of the same size and format.

        Raises:
            ValueError: it is from another size or format; nothing is changed.
            StateLostError: a transfer failed; a part is stored.
        """
        this = self._groups[group]
        expected = this.stored.format.arrays(this.stored.numel)
        expected.pop("master", None)
        if {name: (array.dtype, array.numel()) for name, array in codes.items()} != expected:
            raise ValueError(f"moments of another size or format than {this.stored.format}")
        taken = dict.fromkeys(codes, 0)
        try:
            for chunk in self._store.sweep([this.stored]):
                for name, source in codes.items():
                    count = chunk.arrays[name].numel()
                    chunk.arrays[name].copy_(source[taken[name] : taken[name] + count])
                    taken[name] += count
        except BaseException as error:
            self.lose(error)
            raise


def _step_chunk(
    chunk: Chunk, group: _Group, grad: Tensor, out: Tensor | None, settings: Mapping[str, Any]
) -> None:
    part = slice(chunk.start, chunk.stop)
    arrays: dict[str, Any] = dict(chunk.arrays)
    master = arrays.pop("master", None)
    weights = None if group.weights is None else group.weights()[part]
    if master is None:
        assert weights is not None
        master, target = weights, None
    elif group.stored.format.master == "split":
        target = weights
    else:
        target = None if out is None else out[part]
    with torch.no_grad():
        ops.adamw_step_(
            master,
            grad[part],
            arrays.pop("exp_avg"),
            arrays.pop("exp_avg_sq"),
            target,
            **arrays,
            **settings,
            first_element=chunk.start,
        )


def _master(chunk: Chunk, group: _Group) -> Tensor:
    stored = chunk.arrays.get("master")
    if group.weights is None:
        assert stored is not None
        return stored
    weights = group.weights()[chunk.start : chunk.stop]
    return weights if stored is None else join_master(weights, stored)


def _write_master(chunk: Chunk, group: _Group, values: Tensor) -> None:
    values = values.to(device="cpu", dtype=torch.float32)
    weights = None if group.weights is None else group.weights()[chunk.start : chunk.stop]
    stored = chunk.arrays.get("master")
    if weights is None:
        chunk.arrays["master"].copy_(values)
    elif stored is None:
        weights.copy_(values)
    else:
        high, low = split_master(values)
        weights.copy_(high)
        stored.copy_(low)


def _moment(chunk: Chunk, name: str) -> Tensor:
    stored = chunk.arrays[name]
    if stored.dtype is torch.uint8:
        return dequantize_moment(stored, chunk.arrays[f"{name}_scale"], signed=name == "exp_avg")
    return stored


def _write_moment(chunk: Chunk, name: str, values: Tensor) -> None:
    stored = chunk.arrays[name]
    if stored.dtype is torch.uint8:
        codes, scales = quantize_moment(values, signed=name == "exp_avg")
        stored.copy_(codes)
        chunk.arrays[f"{name}_scale"].copy_(scales)
    else:
        stored.copy_(values)
