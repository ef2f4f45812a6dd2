# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1 and 2 with optimizer states on NVMe, where stock keeps them in memory, or in a compact form.

Replaces the step of a group and what looks at its states in deepspeed/runtime/zero/stage_1_and_2.py. Stock
keeps master, moments and fp32 gradient of each group in memory. Here masters and moments go to a store once
DeepSpeed has made them; gradients stay as stock has them. ``param_buffer_of_bit16_for_cpu_offload_groups``,
through which stock sends updated weights to the device, is the low-precision part of a split master.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peftds_ext.errors import ConfigError
from peftds_ext.integrations.deepspeed.offload import offloads_optimizer_to_nvme
from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.integrations.deepspeed.stage3 import adam_settings, has_step_hooks, why_no_kernel
from peftds_ext.integrations.deepspeed.state_settings import refuse_compact, wants_compact
from peftds_ext.integrations.deepspeed.stored_states import (
    SAVED,
    Lender,
    choose_format,
    describe_states,
    log_states,
    open_states,
    placeholder,
    restore_codes,
)
from peftds_ext.optim.states import OptimizerStates

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed._stage12_seam import Stage12Seam
else:
    Stage12Seam = object

logger = logging.getLogger("peftds_ext")


class StoredStates12(Stage12Seam):
    """Keeps the states of all groups in a store, or of none."""

    _peftds_config: Mapping[str, Any]
    _peftds_loading = False

    # ---- construction -----------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        """Move what DeepSpeed has made into the store, group by group."""
        super().initialize_optimizer_states()
        config = read_section(self._peftds_config).optimizer
        if not self.cpu_offload:
            refuse_compact(config, "the optimizer is not offloaded")
            return
        on_disk = offloads_optimizer_to_nvme(self._peftds_config)
        if not on_disk and not wants_compact(config):
            return
        reason = self._why_not_stored()
        if reason:
            refuse_compact(config, reason)
            logger.warning("DeepSpeed keeps optimizer states in memory and not on NVMe: %s", reason)
            return
        states = self._peftds_states = open_states(self._peftds_config)
        weakref.finalize(self, states.close)
        self._peftds_lender = Lender(states, self.optimizer, lambda: self.single_partition_of_fp32_groups)
        try:
            for group, master in enumerate(self.single_partition_of_fp32_groups):
                buffer = self.param_buffer_of_bit16_for_cpu_offload_groups[group]
                form = choose_format(config, buffer.dtype, in_memory=True)
                weights = functools.partial(Tensor.detach, buffer) if form.needs_weights else None
                states.add(master.numel(), form, weights)
                states.initialize(group, master.detach())
                master.data = placeholder(master.numel())
        except BaseException:
            states.close()
            raise
        log_states(states)

    def _why_not_stored(self) -> str:
        if reason := why_no_kernel(self):
            return reason
        if self.has_moe_layers:
            return "there are layers of experts"
        return ""

    @property
    def _stored_states(self) -> OptimizerStates | None:
        return self.__dict__.get("_peftds_states")

    def peftds_state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's masters and moments in ``"memory"`` and on ``"disk"``."""
        if self._stored_states is not None:
            return self._stored_states.usage()
        states = (value for state in self.optimizer.state.values() for value in state.values())
        tensors = [*self.single_partition_of_fp32_groups, *(item for item in states if torch.is_tensor(item))]
        return {"memory": sum(tensor.nbytes for tensor in tensors), "disk": 0}

    def destroy(self) -> None:
        """Remove the file, too."""
        super().destroy()
        if self._stored_states is not None:
            self._stored_states.close()

    def _cover(self, *, keep_changes: bool) -> None:
        """Do nothing: there are no parameters on NVMe (see ``NvmeCheckpoints``)."""

    # ---- the step ---------------------------------------------------------------------------

    def unscale_and_clip_grads(self, grad_groups_flat: Any, total_norm: Any) -> None:
        """Keep the factor for the kernel, so that a step that has failed can be made again."""
        if self._stored_states is None or has_step_hooks(self.optimizer):
            super().unscale_and_clip_grads(grad_groups_flat, total_norm)
            return
        one = torch.ones(1)
        super().unscale_and_clip_grads([one], total_norm)
        self._peftds_grad_scale = float(one)

    def _optimizer_step(self, group_no: int) -> None:
        """Run the kernel on a group where its states are; it writes the low-precision weights as well."""
        if self._stored_states is None:
            super()._optimizer_step(group_no)
            return
        master = self.single_partition_of_fp32_groups[group_no]
        if has_step_hooks(self.optimizer):
            self._peftds_lender.lend(group_no)
            self._hp_optimizer_states_linked = True  # who looks for states finds them in the store
            super()._optimizer_step(group_no)
            return
        settings = adam_settings(self.optimizer.param_groups[group_no], adamw_mode=self.optimizer.adam_w_mode)
        settings["grad_scale"] = self._peftds_grad_scale
        buffer = self.param_buffer_of_bit16_for_cpu_offload_groups[group_no]
        self._stored_states.step(group_no, master.grad, buffer, settings)
        self.optimizer._opt_called = True  # what torch's schedulers look for
        master.data = buffer  # what stock is about to copy into the buffer

    def step(self, closure: Any = None) -> None:
        """Step, and let the masters be placeholders again."""
        if self._stored_states is None:
            super().step(closure)
            return
        succeeded = False
        try:
            super().step(closure)
            succeeded = True
        finally:
            for group, master in enumerate(self.single_partition_of_fp32_groups):
                if self._peftds_lender.has_lent(group):
                    self._peftds_lender.give_back(group, write=succeeded)
                else:
                    master.data = placeholder(master.numel())

    # ---- who looks at states ------------------------------------------------------------------

    def _link_all_hp_params(self) -> None:
        """Let what reads and sets masters and moments of a parameter find them in the store."""
        super()._link_all_hp_params()
        if self._stored_states is None:
            return
        for group, params in enumerate(self.bit16_groups):
            for param in params:
                if param._hp_mapping is not None:
                    fragments = _StoredFragments(self._stored_states, group, param._hp_mapping)
                    param.get_full_hp_param = MethodType(fragments.get_full, param)
                    param.set_full_hp_param = MethodType(fragments.set_full, param)

    @contextlib.contextmanager
    def _all_lent(self, *, write: bool) -> Any:
        if self._stored_states is None:
            yield
            return
        with self._peftds_lender.all_lent(write=write):
            yield

    def state_dict(self) -> Any:
        """Return the state dict that CPU offload would give, and what tells of the form."""
        with self._all_lent(write=False):
            saved = super().state_dict()
            if self._stored_states is not None:
                saved[SAVED] = describe_states(self._stored_states)
        return saved

    def _load_legacy_checkpoint(
        self, state_dict_list: Any, load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        """Take over a state dict of any form, of CPU offload and of stock DeepSpeed."""
        with self._all_lent(write=True):
            super()._load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)
        if self._stored_states is not None and load_optimizer_states:
            from deepspeed import comm

            restore_codes(self._stored_states, state_dict_list[comm.get_rank(group=self.dp_process_group)])

    def _load_universal_checkpoint(self, *args: Any) -> None:
        if self._stored_states is not None:
            raise ConfigError(
                "checkpoint.load_universal: under ZeRO-1 and 2 a universal checkpoint is not loaded into "
                'states that are on NVMe or compact; load it with offload_optimizer {"device": "cpu"} and '
                "fp32 states, save a checkpoint, and resume from that"
            )
        super()._load_universal_checkpoint(*args)

    def _restore_from_bit16_weights(self) -> None:
        """Make the masters from the weights; the moments stay."""
        if self._stored_states is None or self._peftds_lender.has_lent(0):
            super()._restore_from_bit16_weights()
            return
        from deepspeed import comm

        for group, partitions in enumerate(self.parallel_partitioned_bit16_groups):
            rank = comm.get_rank(group=self.real_dp_process_group[group])
            self._stored_states.set_master(group, partitions[rank].detach())


class _StoredFragments:
    """A parameter's part of a group whose states are stored; see deepspeed/utils/tensor_fragment.py."""

    def __init__(self, states: OptimizerStates, group: int, mapping: Any) -> None:
        self._states, self._group, self._mapping = states, group, mapping

    def get_full(self, param: Tensor, optim_state_key: str | None = None) -> Tensor:
        """Return the whole master, or a moment, gathered from all ranks."""
        from deepspeed import comm

        whole = torch.zeros_like(param, dtype=torch.float32).flatten()
        ours, place = self._mapping.lp_fragment_address, self._mapping.hp_fragment_address
        part = self._states.read(
            self._group, optim_state_key or "master", place.start, place.start + place.numel
        )
        whole.narrow(0, ours.start, ours.numel).copy_(part)
        comm.all_reduce(whole, group=param._dp_group)  # type: ignore[attr-defined]
        return whole.reshape_as(param)

    def set_full(self, param: Tensor, value: Tensor, optim_state_key: str | None = None) -> None:
        """Set the master, or a moment, from its whole value."""
        name = optim_state_key or "master"
        ours, place = self._mapping.lp_fragment_address, self._mapping.hp_fragment_address
        lent = self._states.lend(self._group, (name,))
        lent[name].narrow(0, place.start, place.numel).copy_(
            value.flatten().narrow(0, ours.start, ours.numel)
        )
        self._states.take_back(self._group, lent)


@functools.cache
def _class_over(stock: type) -> type:
    return type("PeftdsZeroOptimizer", (StoredStates12, stock), {})


def engine_class(stock: type, raw: Mapping[str, Any]) -> type:
    """Return the engine's ZeRO-1 and 2 optimizer class over ``stock``, for one configuration."""
    return type("PeftdsZeroOptimizer", (_class_over(stock),), {"_peftds_config": raw})
