# SPDX-License-Identifier: Apache-2.0
"""Optimizer states that are not kept as DeepSpeed keeps them: on a disk, or in a compact form in memory.

What the optimizer classes of all ZeRO stages share. In the place of a master that is stored stands a tensor
of its size without memory behind it, all NaN: DeepSpeed's bookkeeping and gradients hang on it as on the
master itself, who reads it unlent sees at once that it is not the master, and it cannot be written.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from peftds_ext.config import OptimizerConfig
from peftds_ext.integrations.deepspeed.offload import (
    OPTIMIZER_NVME_PATH,
    offloads_optimizer_to_nvme,
    optimizer_nvme_path,
)
from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.optim.state_format import StateFormat
from peftds_ext.optim.state_store import FileStore, MemoryStore, StateStore
from peftds_ext.optim.states import MOMENTS, OptimizerStates
from peftds_ext.store.engine import StorageEngine, choose_settings
from peftds_ext.store.folder import StoreFolder

logger = logging.getLogger("peftds_ext")

ALL: Final = ("master", *MOMENTS)

SAVED: Final = "peftds_ext"
"""Key of what is added to DeepSpeed's state dict of the optimizer."""


def choose_format(config: OptimizerConfig, dtype: torch.dtype, *, in_memory: bool) -> StateFormat:
    """Return the form of a group's states; ``dtype`` and ``in_memory`` tell of its low-precision weights."""
    moments = config.states or "fp32"
    split = (config.master or ("fp32" if moments == "fp32" else "split")) == "split"
    if split and in_memory and dtype in (torch.bfloat16, torch.float32):
        return StateFormat("split" if dtype is torch.bfloat16 else "weight", moments)
    return StateFormat("fp32", moments)


def open_states(raw: Mapping[str, Any]) -> OptimizerStates:
    """Return states without any group yet, on the disk or in memory as the configuration says.

    Raises:
        StorageError: the folder or its file cannot be made; the message names the key.
    """
    return OptimizerStates(_file_store(raw) if offloads_optimizer_to_nvme(raw) else MemoryStore())


def _file_store(raw: Mapping[str, Any]) -> StateStore:
    from deepspeed import comm

    root = Path(str(optimizer_nvme_path(raw))).absolute()
    engine = StorageEngine(choose_settings(read_section(raw).io, root, raw.get("aio")))
    rank, ranks = comm.get_rank(), comm.get_world_size()
    folder = StoreFolder.create(root, rank=rank, what=OPTIMIZER_NVME_PATH)
    try:
        store = FileStore(folder, engine, rank=rank, world_size=ranks)
    except BaseException:
        folder.remove()
        raise
    logger.info("optimizer states on disk: %s, engine %s", store.file.path, engine.method)
    return store


def log_states(states: OptimizerStates) -> None:
    """Say once where the states are, and in which form."""
    usage = states.usage()
    where = "on the disk" if usage["disk"] else "in memory"
    logger.info("optimizer states %s: %s, %d bytes", where, states.describe(), sum(usage.values()))


def placeholder(numel: int) -> Tensor:
    """Return what stands for a master that is stored."""
    return torch.full((1,), torch.nan).expand(numel)


class Lender:
    """Puts states where DeepSpeed looks for them, masters' ``data`` and ``optimizer.state``, for a while."""

    def __init__(self, states: OptimizerStates, optimizer: Any, masters: Callable[[], list[Tensor]]) -> None:
        """Lend to the torch ``optimizer``; ``masters`` returns what stands for the masters."""
        self._states, self._optimizer, self._masters = states, optimizer, masters
        self._lent: dict[int, tuple[str, ...]] = {}
        self.stored = 0
        """How often something that was lent has been stored."""

    def has_lent(self, group: int) -> bool:
        """Whether a group is lent now."""
        return group in self._lent

    def lend(self, group: int, names: tuple[str, ...] = ALL) -> None:
        """Lend some of a group's tensors.

        Raises:
            StorageError: they cannot be read (StateLostError: an earlier step failed half-way).
        """
        lent = self._states.lend(group, names)
        master = self._masters()[group]
        if "master" in lent:
            master.data = lent["master"]
        moments = {name: tensor for name, tensor in lent.items() if name != "master"}
        self._optimizer.state[master] = {"step": self._states.steps(group), **moments}
        self._lent[group] = names

    def give_back(self, group: int, *, write: bool) -> None:
        """End the loan, if there is one; with ``write`` store what was lent. Moments that are gone are zero.

        Raises:
            StateLostError: it cannot be written; a part is stored.
        """
        names = self._lent.pop(group, None)
        if names is None:
            return
        master = self._masters()[group]
        values, state = master.detach(), self._optimizer.state.pop(master, {})
        master.data = placeholder(master.numel())
        if not write:
            return
        zeros = torch.zeros(1).expand(master.numel())
        tensors = {name: state.get(name, zeros).reshape(-1) for name in names if name != "master"}
        if "master" in names:
            tensors["master"] = values
        self._states.take_back(group, tensors)
        self._states.set_steps(group, int(state.get("step", 0)))
        self.stored += 1

    @contextlib.contextmanager
    def all_lent(self, *, write: bool) -> Iterator[None]:
        """Lend everything; after an exception nothing is stored.

        Raises:
            StorageError: as :meth:`lend` and :meth:`give_back`.
        """
        groups = range(len(self._states))
        write_back = False
        try:
            for group in groups:
                self.lend(group)
            yield
            write_back = write
        finally:
            for group in groups:
                self.give_back(group, write=write_back)


# -- checkpoints -----------------------------------------------------------------------------------------


def describe_states(states: OptimizerStates) -> dict[str, Any]:
    """Return what a checkpoint tells of the stored form, and the codes that its fp32 tensors do not bear out.

    Raises:
        StorageError: they cannot be read.
    """
    formats = [states.format(group) for group in range(len(states))]
    codes = [states.save_codes(i) if form.moments == "int8" else None for i, form in enumerate(formats)]
    return {"moments": [form.moments for form in formats], "codes": codes}


def restore_codes(states: OptimizerStates, saved: Mapping[str, Any]) -> None:
    """Go on with the very codes of a checkpoint whose fp32 tensors were taken over, if it is of this form.

    Raises:
        StorageError: they cannot be written.
    """
    told = saved.get(SAVED, {})
    before = told.get("moments") or ["fp32"] * len(states)
    now = [states.format(group).moments for group in range(len(states))]
    if before != now:
        logger.info("the checkpoint's moments are %s and become %s", _named(before), _named(now))
        return
    for group, codes in enumerate(told.get("codes", ())):
        if codes is not None:
            states.load_codes(group, codes)


def _named(moments: Sequence[str]) -> str:
    return ", ".join(sorted(set(moments)))
