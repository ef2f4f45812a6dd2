# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with parameters on NVMe: the memory budget, and checkpoints that hold and restore what is there.

DeepSpeed keeps a parameter gathered when it is used again within ``stage3_max_reuse_distance`` elements, 1e9
by default, and does not know how much memory the swapper has (deepspeed/runtime/zero/
partitioned_param_coordinator.py, ``__params_to_release``). Its checkpoints take a frozen partition that is on
NVMe for the placeholder that it has in memory, and cannot load trainable ones (deepspeed/runtime/engine.py,
``_get_param_fragment_func``; stage3.py, ``_rigid_load_state_dict``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peftds_ext.integrations.deepspeed.offload import memory_budget, offloads_parameters_to_nvme
from peftds_ext.integrations.deepspeed.param_swapper import ParameterSwapper

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed._stage3_seam import Stage3Seam
else:
    Stage3Seam = object

logger = logging.getLogger("peftds_ext")


class BudgetedReuse(Stage3Seam):
    """Keeps no more gathered than ``buffer_count`` x ``buffer_size``, where the user gave these."""

    def initialize_ds_offload(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the distances before the coordinator is built."""
        raw = kwargs["ds_config"]
        budget = memory_budget(raw, 1) if isinstance(raw, dict) and offloads_parameters_to_nvme(raw) else None
        if budget is not None:
            for name in ("max_reuse_distance", "max_live_parameters"):
                kwargs[name] = min(int(kwargs[name]), budget)
            logger.info("%d elements may stay between uses (buffer_count x buffer_size)", budget)
        return super().initialize_ds_offload(*args, **kwargs)


class NvmeCheckpoints(Stage3Seam):
    """Saves and loads partitions that are on NVMe as if they were in memory."""

    _peftds_loading = False

    def checkpoint_event_prologue(self) -> None:
        """Show DeepSpeed the bytes of frozen partitions, which it saves or overwrites."""
        super().checkpoint_event_prologue()
        stepped = {id(param) for group in self.fp16_groups for param in group}  # saved and loaded as masters
        self._peftds_exposed: list[Any] = []
        try:
            for param in self._swapped_parameters():
                if id(param) not in stepped:
                    self._peftds_exposed.append(param)
                    param.nvme_swapper.expose(param)
        except BaseException:
            self._cover(keep_changes=False)
            raise

    def checkpoint_event_epilogue(self) -> None:
        """Take them away again; write those that a load has changed."""
        self._cover(keep_changes=self._peftds_loading)
        super().checkpoint_event_epilogue()

    def _cover(self, *, keep_changes: bool) -> None:
        for param in self.__dict__.pop("_peftds_exposed", ()):
            param.nvme_swapper.cover(param, keep_changes=keep_changes)

    def _rigid_load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Give DeepSpeed memory to restore trainable partitions in, and write it to the disk."""
        with self._lent_buffers() as groups:
            super()._rigid_load_state_dict(*args, **kwargs)
            for group in groups:
                self._write_lent(group)

    def _restore_from_bit16_weights(self) -> None:
        """Give DeepSpeed the trainable partitions to make the masters from."""
        with self._lent_buffers() as groups:
            for group in groups:
                self._swap_in_sub_group_to_flat_buffer(self.fp16_partitioned_groups_flat[group], group)
            super()._restore_from_bit16_weights()

    def _swapped_parameters(self) -> Iterator[Any]:
        for param in self.module.parameters():
            swapper = getattr(param, "nvme_swapper", None)
            if isinstance(swapper, ParameterSwapper) and swapper.has(param):
                yield param

    @contextlib.contextmanager
    def _lent_buffers(self) -> Iterator[list[int]]:
        """Give each sub-group without a buffer one in memory; yields these sub-groups."""
        flat = self.fp16_partitioned_groups_flat
        groups = [
            group
            for group, buffer in enumerate(flat)
            if buffer is None and isinstance(self.fp16_groups[group][0].nvme_swapper, ParameterSwapper)
        ]
        for group in groups:
            swapper = self.fp16_groups[group][0].nvme_swapper
            flat[group] = swapper.staging(self.fp16_partitioned_groups_flat_numel[group], self.dtype)
        try:
            yield groups
        finally:
            for group in groups:
                flat[group] = None

    def _write_lent(self, group: int) -> None:
        sizes = [partition.ds_numel for partition in self.fp16_partitioned_groups[group]]
        for param, values in zip(
            self.fp16_groups[group], self.fp16_partitioned_groups_flat[group].split(sizes), strict=True
        ):
            if param.nvme_swapper.has(param):
                param.nvme_swapper.update_partition(param, values)
                param.nvme_swapper.remove_partition_and_release_buffers([param])
            else:  # DeepSpeed has counted on what is in memory alone, and given it other places of the buffer
                param.ds_tensor.data = values.clone()


def note_checkpoints(engine: Any) -> None:
    """Let the optimizer know when its engine loads a checkpoint, and which one was the last.

    The events of a load are those of a save, and of either one that fails DeepSpeed does not tell the end.
    """
    engine.load_checkpoint = _noted(engine, engine.load_checkpoint, loads=True)
    engine.save_checkpoint = _noted(engine, engine.save_checkpoint, loads=False)


def _noted(engine: Any, stock: Any, *, loads: bool) -> Any:
    @functools.wraps(stock)
    def noted(*args: Any, **kwargs: Any) -> Any:
        engine.optimizer._peftds_loading = loads
        try:
            result = stock(*args, **kwargs)
        finally:
            engine.optimizer._peftds_loading = False
            engine.optimizer._cover(keep_changes=False)  # there is something to cover only after a failure
        folder, *rest = inspect.signature(stock).bind(*args, **kwargs).args
        tag = rest[0] if rest and rest[0] is not None else f"global_step{engine.global_steps}"
        _remember(engine, Path(folder) / str(tag))
        return result

    return noted


def _remember(engine: Any, checkpoint: Path) -> None:
    states = getattr(engine.optimizer, "_peftds_states", None)
    if states is not None and checkpoint.is_dir():
        states.checkpoint = str(checkpoint)
