# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with optimizer states on NVMe or in a compact form.

Replaces, in deepspeed/runtime/zero/stage3.py, what happens to the sub-groups that DeepSpeed calls swappable:
``_configure_tensor_swapping``, ``_optimizer_states_and_gradient_swap_in`` and ``_swap_out``. Stock reads the
states of a whole sub-group, steps, and writes them; small sub-groups and all gradients take other ways.
Here every sub-group goes where the configuration says, gradients stay in memory, and the step runs through
the file in chunks (see ``peftds_ext/optim/state_store.py``). To the rest of DeepSpeed the states look as
with CPU offload: ``swap_optimizer`` is false, so that checkpoints take the ordinary way.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.integrations.deepspeed.state_settings import refuse_compact, wants_compact
from peftds_ext.integrations.deepspeed.stored_states import (
    ALL,
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
    from peftds_ext.integrations.deepspeed.stage3 import FusedStep as Base
else:
    Base = object

logger = logging.getLogger("peftds_ext")


class StoredStates(Base):
    """Keeps the states of all sub-groups in a store, or of none."""

    # ---- construction -----------------------------------------------------------------------

    def _configure_tensor_swapping(self, *args: Any) -> None:
        """Wait until it is known whether the states are ours."""
        self._peftds_swapping_arguments = args

    def _setup_for_real_optimizer(self) -> None:
        """Open the store before DeepSpeed makes the masters."""
        self._open_store()
        try:
            super()._setup_for_real_optimizer()
        except BaseException:
            self._close_store()
            raise
        if self._stored_states is not None:
            log_states(self._stored_states)

    def _open_store(self) -> None:
        raw, config = self._peftds_config, read_section(self._peftds_config).optimizer
        if not self.offload_optimizer:
            refuse_compact(config, "the optimizer is not offloaded")
            return
        if not self.swap_optimizer and not wants_compact(config):
            return
        reason = self._why_not_stored()
        if reason:
            refuse_compact(config, reason)
            logger.warning("DeepSpeed's own swapper keeps optimizer states on NVMe: %s", reason)
            super()._configure_tensor_swapping(*self._peftds_swapping_arguments)
            return
        states = self._peftds_states = open_states(raw)
        self._peftds_lender = Lender(states, self.optimizer, lambda: self.fp32_partitioned_groups_flat)
        weakref.finalize(self, states.close)
        self.swap_optimizer = False
        self.optimizer_swapper = _MasterLoader(self)
        try:
            for group, numel in enumerate(self.fp16_partitioned_groups_flat_numel):
                (dtype,) = self._low_precision_dtypes(group)
                form = choose_format(config, dtype, in_memory=self._in_one_buffer(group))
                if config.master == "split" and form.master == "fp32":
                    self._say_once(
                        "optimizer.master: fp32 copies are kept of weights that are fp16 or on NVMe"
                    )
                states.add(int(numel), form, self._weights_of(group) if form.needs_weights else None)
        except BaseException:
            self._close_store()
            raise

    def _why_not_stored(self) -> str:
        """Return why DeepSpeed has to keep the states of all sub-groups, or ""."""
        if self.zenflow or self.use_muon:
            return "ZenFlow or Muon steps parameters"
        if self.partial_offload < 1.0:
            return "some sub-groups are updated on the accelerator (offload ratio below 1)"
        reasons = (self._why_not_steppable(i) for i in range(len(self.fp16_groups)))
        return next((reason for reason in reasons if reason), "")

    def _weights_of(self, group: int) -> Any:
        optimizer = weakref.ref(self)

        def weights() -> Tensor:
            owner = optimizer()
            assert owner is not None
            return owner._write_target(group)

        return weights

    @property
    def _stored_states(self) -> OptimizerStates | None:
        return self.__dict__.get("_peftds_states")

    def _is_stored(self, sub_group_id: int) -> bool:
        return self._stored_states is not None

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        """Tell DeepSpeed that the states are elsewhere, so that it asks before it touches them."""
        return self._is_stored(sub_group_id) or bool(super()._swappable_optimizer_subgroup(sub_group_id))

    def destroy(self) -> None:
        """Remove the file, too."""
        super().destroy()
        self._close_store()

    def _close_store(self) -> None:
        if self._stored_states is not None:
            self._stored_states.close()

    # ---- the step ---------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Step; what fails when DeepSpeed has stepped some sub-groups and not the others loses the states."""
        if self._stored_states is None:
            super().step(closure)
            return
        before = self._peftds_lender.stored
        try:
            super().step(closure)
        except BaseException as error:
            if self._peftds_lender.stored != before:
                self._stored_states.lose(error)
            raise

    def _prepare_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        """Read nothing here if the kernel is going to step the sub-group where it is."""
        if not (self._is_stored(sub_group_id) and self._fuses(sub_group_id)):
            super()._prepare_sub_group(sub_group_id, timer_names)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        """Write nothing here if the kernel has stepped the sub-group where it is."""
        if not self._is_stored(sub_group_id) or self._peftds_lender.has_lent(sub_group_id):
            super()._release_sub_group(sub_group_id, timer_names)

    # ---- who needs whole tensors ------------------------------------------------------------

    def _optimizer_states_and_gradient_swap_in(self, sub_group_id: int, timer_names: Any = None) -> None:
        """Lend DeepSpeed the states as fp32 tensors."""
        if self._is_stored(sub_group_id):
            self._peftds_lender.lend(sub_group_id)
        else:
            super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)

    def _optimizer_states_and_gradient_swap_out(self, sub_group_id: int, timer_names: Any = None) -> None:
        """Take back what DeepSpeed has changed."""
        if self._is_stored(sub_group_id):
            self._peftds_lender.give_back(sub_group_id, write=True)
        else:
            super()._optimizer_states_and_gradient_swap_out(sub_group_id, timer_names)

    def _release_swap_buffers(self, sub_group_id: int) -> None:
        """Drop what DeepSpeed has only read; gradients stay."""
        if self._is_stored(sub_group_id):
            self._peftds_lender.give_back(sub_group_id, write=False)
        else:
            super()._release_swap_buffers(sub_group_id)

    def _writeback_swap_state(self, sub_group_id: int, write_opt_state: bool, write_gradients: bool) -> None:
        """Take back what DeepSpeed has changed; gradients are in memory."""
        if self._is_stored(sub_group_id):
            self._peftds_lender.give_back(sub_group_id, write=write_opt_state)
        else:
            super()._writeback_swap_state(sub_group_id, write_opt_state, write_gradients)

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any:
        """Return a partition's master or moment: a copy, or lent for the caller to write into."""
        group, offset, numel = self.grad_position[self.get_param_id(param)]
        if not self._is_stored(group):
            return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)
        name = optim_state_key or "master"
        if name not in ALL:
            raise KeyError(name)
        if release_swap_buffers:
            return self._peftds_states.read(group, name, offset, offset + numel), group
        self._peftds_lender.lend(group, (name,))
        master = self.fp32_partitioned_groups_flat[group]
        whole = master if name == "master" else self.optimizer.state[master][name]
        return whole.detach().narrow(0, offset, numel), group

    # ---- checkpoints ------------------------------------------------------------------------

    def _all_lent(self, *, write: bool) -> contextlib.AbstractContextManager[None]:
        if self._stored_states is None:
            return contextlib.nullcontext()
        lent: contextlib.AbstractContextManager[None] = self._peftds_lender.all_lent(write=write)
        return lent

    def _rigid_state_dict(self) -> Any:
        """Return the state dict that CPU offload would give, and what tells of the form."""
        with self._all_lent(write=False):
            saved = super()._rigid_state_dict()
            if self._stored_states is not None:
                # The tensors of the moment; the list itself holds placeholders afterwards.
                saved["fp32_flat_groups"] = [group.detach() for group in saved["fp32_flat_groups"]]
                saved[SAVED] = describe_states(self._stored_states)
        return saved

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        """Take over a state dict of any form, of CPU offload and of stock DeepSpeed."""
        with self._all_lent(write=True):
            super()._rigid_load_state_dict(state_dict, load_optimizer_states=load_optimizer_states)
        if self._stored_states is not None and load_optimizer_states:
            restore_codes(self._stored_states, state_dict)

    def _load_universal_checkpoint(self, *args: Any) -> None:
        with self._all_lent(write=True):
            super()._load_universal_checkpoint(*args)

    def _restore_from_bit16_weights(self) -> None:
        """Make the masters from the weights; the moments stay."""
        if self._stored_states is None:
            super()._restore_from_bit16_weights()
            return
        for group, flat in enumerate(self.fp16_partitioned_groups_flat):
            source = flat
            if source is None:
                source = torch.empty(int(self.fp16_partitioned_groups_flat_numel[group]))
                self._swap_in_sub_group_to_flat_buffer(source, group)
            self._peftds_states.set_master(group, source)


class _MasterLoader:
    """What ``_create_fp32_partitions`` calls on an optimizer swapper."""

    def __init__(self, optimizer: StoredStates) -> None:
        self._optimizer = weakref.ref(optimizer)

    def initialize_parameters(self, parameters: list[Tensor], src_tensors: list[Tensor]) -> None:
        """Store masters that begin as ``src_tensors``; ``parameters`` are the optimizer's empty ones."""
        optimizer = self._optimizer()
        assert optimizer is not None
        groups = {id(master): i for i, master in enumerate(optimizer.fp32_partitioned_groups_flat)}
        for parameter, source in zip(parameters, src_tensors, strict=True):
            optimizer._peftds_states.initialize(groups[id(parameter)], source)
            parameter.data = placeholder(source.numel())
