# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 steps that go on while the next forward runs (``optimizer.overlap``).

Once the norm is known, what a step does to one parameter depends on no other. So ``step()`` only notes what
is to be done, and a thread does it in the order of the parameters, which is the forward's. Whoever needs a
parameter before waits for it: a layer that is entered, ``GatheredParameters`` and every other gather. Whoever
looks at states or gradients, saves or loads, hands a gradient over or steps, waits for all.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peftds_ext.integrations.deepspeed.layer_offload import coordinator_of
from peftds_ext.integrations.deepspeed.parameter_calls import before_gathers
from peftds_ext.integrations.deepspeed.section import read_section
from peftds_ext.optim.late_step import LateStep, Report

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed.stage3_states import StoredStates as Base
else:
    Base = object

logger = logging.getLogger("peftds_ext")

_Work = tuple[int, Tensor, Tensor, dict[str, Any]]
"""Sub-group, gradient, where the weights go, and the settings of the moment."""


class LateSteps(Base):
    """Lets a thread do what ``_optimizer_step`` is called for, where that does not show."""

    _peftds_late: LateStep | None = None

    def _setup_for_real_optimizer(self) -> None:
        """Decide when the sub-groups and their states are known."""
        super()._setup_for_real_optimizer()
        wanted = read_section(self._peftds_config).optimizer.overlap
        if not self.offload_optimizer or wanted is False:
            return
        reason = self._why_not_late()
        if wanted is None:
            on_disk = self._stored_states is not None and self._stored_states.usage()["disk"] > 0
            if not on_disk:
                return
            if not reason and any(param.ds_persist for group in self.fp16_groups for param in group):
                reason = "trainable parameters are persistent (stage3_param_persistence_threshold)"
        if reason:
            level = logging.WARNING if wanted else logging.INFO
            logger.log(level, "steps do not overlap the next forward: %s", reason)
            return
        self._peftds_late = LateStep()
        self._peftds_work: list[_Work] = []
        self._wait_where_parameters_are_used()
        logger.info("steps overlap the next forward")

    def _why_not_late(self) -> str:
        if coordinator_of(self) is None:
            return "DeepSpeed's own hooks fetch parameters"
        if not self._keeps_gradients:
            return "stock DeepSpeed hands gradients over"
        flat = self.fp16_partitioned_groups_flat
        if not all(buffer is not None and buffer.device.type == "cpu" for buffer in flat):
            return "trainable parameters are not in host memory"
        return ""

    def _wait_where_parameters_are_used(self) -> None:
        optimizer = weakref.ref(self)

        def wait_for(parameters: Iterable[Any]) -> None:
            owner = optimizer()
            if owner is not None:
                owner._wait_for(parameters)

        self.parameter_offload.param_coordinator.wait_before_gather(wait_for)
        before_gathers(self.module.parameters(), wait_for)

    def _wait_for(self, parameters: Iterable[Any]) -> None:
        """Wait until these parameters are what the last step has made of them.

        Raises:
            StateLostError: the step failed.
        """
        if self._peftds_late is None:
            return
        needed: dict[int, int] = {}
        for parameter in parameters:
            # Whether it is stepped was decided when the optimizer was made, whatever requires_grad says now.
            place = self.grad_position.get(self.get_param_id(parameter))
            if place is not None:
                group, offset, numel = place
                needed[group] = max(needed.get(group, 0), offset + numel)
        if needed:
            self._peftds_late.wait_for(needed)

    def _finish_step(self) -> None:
        """Wait until the last step is over.

        Raises:
            StateLostError: it failed.
        """
        if self._peftds_late is not None:
            self._peftds_late.finish()

    # ---- the step ---------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Step when the last step is over."""
        self._finish_step()
        if self._peftds_late is not None:
            self._peftds_work = []  # what a step that was broken off has noted
        super().step(closure)

    def _apply(
        self,
        sub_group_id: int,
        gradient: Tensor,
        target: Tensor,
        settings: dict[str, Any],
        done: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Note what is to be done."""
        if self._peftds_late is None:
            super()._apply(sub_group_id, gradient, target, settings, done)
        else:
            self._peftds_work.append((sub_group_id, gradient, target, settings))

    def _post_step(self, timer_names: Any) -> None:
        """Start doing it. Persistent parameters that are trained are gathered when they are used."""
        if self._peftds_late is None:
            super()._post_step(timer_names)
            return
        work, self._peftds_work = self._peftds_work, []
        apply = super()._apply

        def do(report: Report) -> None:
            for sub_group_id, gradient, target, settings in work:
                apply(sub_group_id, gradient, target, settings, functools.partial(report, sub_group_id))

        self._peftds_late.begin(do)
        persistent = self.persistent_parameters
        stepped = self.grad_position
        self.persistent_parameters = [p for p in persistent if self.get_param_id(p) not in stepped]
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent

    # ---- who waits for all --------------------------------------------------------------------

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> Any:
        """Let gradients be what the step reads until it is over."""
        self._finish_step()
        return super().partition_grads(params_to_release, grad_partitions)

    def get_fp32_grad_partitions(self) -> Any:
        self._finish_step()
        return super().get_fp32_grad_partitions()

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        self._finish_step()
        return super()._get_fp32_grad_state_partition(param, release_swap_buffers)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: Any) -> None:
        self._finish_step()
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def _optimizer_states_and_gradient_swap_in(self, sub_group_id: int, timer_names: Any = None) -> None:
        self._finish_step()
        super()._optimizer_states_and_gradient_swap_in(sub_group_id, timer_names)

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any:
        self._finish_step()
        return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)

    def checkpoint_event_prologue(self) -> None:
        self._finish_step()
        super().checkpoint_event_prologue()

    def _rigid_state_dict(self) -> Any:
        self._finish_step()
        return super()._rigid_state_dict()

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        self._finish_step()
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def _load_universal_checkpoint(self, *args: Any) -> None:
        self._finish_step()
        super()._load_universal_checkpoint(*args)

    def _restore_from_bit16_weights(self) -> None:
        self._finish_step()
        super()._restore_from_bit16_weights()

    def destroy(self) -> None:
        """End the thread; what it was doing is done."""
        if self._peftds_late is not None:
            self._peftds_late.close()
        super().destroy()
