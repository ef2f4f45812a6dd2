# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 gradients under optimizer offload: handed over once, in the dtype they have.

Replaces, in deepspeed/runtime/zero/stage3.py, the way back to the device, the fp64 copy for the norm
and the fp32 copy of every gradient (``partition_grads``, ``_offload_grad_partition_at_boundary``), the
two scans for Inf and NaN (``has_overflow``), and, with one rank, the copy into the reduce bucket.

A *window* is what lies between two optimizer steps. The first gradient of a parameter in a window is
copied, later ones are added, and a parameter that got none counts as zero in that window.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peftds_ext import ops

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed.stage3 import FusedStep as Base
else:
    Base = object


class LowPrecisionGradients(Base):
    """Keeps gradients in the flat buffer; there is no fp32 ``.grad`` unless somebody asks for one."""

    @property
    def _keeps_gradients(self) -> bool:
        """Whether the gradients' path is ours; decided when the sub-groups are known, and then fixed."""
        decided: bool | None = self.__dict__.get("_peftds_keeps_gradients")
        if decided is None:
            decided = self._decide_gradient_path()
            self._peftds_keeps_gradients = decided
            # Of this window, by ds_id: the sum of squares of each partition that has a gradient.
            self._peftds_squares: dict[int, Tensor] = {}
            self._peftds_norms: Tensor | None = None
            self._peftds_window_over = self._peftds_step_failed = False
            # Of this window, by ds_id: sums that are still on the device.
            self._peftds_totals: dict[int, Tensor] = {}
        return decided

    def _decide_gradient_path(self) -> bool:
        if not self.offload_optimizer:
            return False
        reason = ""
        if self.zenflow or self.use_muon:
            reason = "ZenFlow or Muon reads fp32 gradients"
        elif self.gradient_accumulation_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reason = f"gradients accumulate in {self.gradient_accumulation_dtype}"
        for sub_group_id in range(len(self.fp16_groups)):
            reason = reason or self._why_not_fused(sub_group_id)
        if reason:
            self._say_once(f"stock DeepSpeed hands gradients over: {reason}")
        return not reason

    # ---- construction -----------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        """Allocate no fp32 gradients. Moments are made by the first step, as stock does."""
        if not self._keeps_gradients:
            super().initialize_optimizer_states()

    def _setup_for_real_optimizer(self) -> None:
        """Give the reduce buckets back where nothing is reduced: on a GPU they take a gigabyte by default."""
        super()._setup_for_real_optimizer()
        if self._keeps_gradients and self._is_alone:
            for bucket in self.ipg_buckets.values():
                bucket.buffer = None

    def _make_buckets(self) -> None:
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator().current_device_name()
        for dtype, bucket in self.ipg_buckets.items():
            if bucket.buffer is None and self.contiguous_gradients:
                bucket.buffer = torch.empty(self.reduce_bucket_size, dtype=dtype, device=device)

    # ---- backward ---------------------------------------------------------------------------

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: Any) -> None:
        """With one rank there is nothing to reduce: hand the gradient over without the bucket."""
        same_dtype = self.get_param_comm_dtype(param) in (param.grad.dtype, self.gradient_accumulation_dtype)
        if not (self._keeps_gradients and self._is_alone and same_dtype):
            self._make_buckets()
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            return
        if not getattr(param, "ds_grad_is_ready", True):
            return
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if not accelerator.resolves_data_dependency():
            self.reduce_and_partition_stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self.reduce_and_partition_stream), torch.no_grad():
            self.partition_grads([param], [param.grad.reshape(-1)])

    @functools.cached_property
    def _is_alone(self) -> bool:
        """Whether reduction leaves a gradient as it is, down to the last bit."""
        from deepspeed import comm as dist

        return bool(
            dist.get_world_size(group=self.dp_process_group) == 1
            and self.sequence_parallel_size == 1
            and self.gradient_predivide_factor == 1.0
            and self.all2all_process_group is None
        )

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> Any:
        """Copy or add each partition into its place in the flat buffer, and free the gradient."""
        if not self._keeps_gradients:
            return super().partition_grads(params_to_release, grad_partitions)
        from deepspeed.accelerator import get_accelerator

        buffers = []
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            if param.partition_numel() * self._get_param_partition_rank(param) < param.ds_numel:
                buffers.append(self._take(param, partition))
                if param.grad is not None and not get_accelerator().is_synchronized_device():
                    param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        self._peftds_norms = None
        return buffers

    def _take(self, param: Any, partition: Tensor) -> Tensor:
        self._leave_finished_window()
        buffer = self._partition_buffer(param).narrow(0, 0, partition.numel())
        self._offload_boundary_param_ids.add(param.ds_id)
        if self._is_on_host(partition):
            add = param.ds_id in self._peftds_squares
            self._peftds_squares[param.ds_id] = ops.accumulate_(buffer, partition, add)
        else:
            self._add_on_device(param, partition, buffer)
        self._refresh_fp32_grad(param, buffer)
        return buffer

    @staticmethod
    def _is_on_host(partition: Tensor) -> bool:
        return partition.device.type == "cpu"

    def _add_on_device(self, param: Any, partition: Tensor, buffer: Tensor) -> None:
        """Accumulate where the gradient is, for the host would have to wait for it; it leaves there once."""
        total = self._peftds_totals.pop(param.ds_id, None)
        if total is None and param.ds_id in self._peftds_squares:  # comes after the window's last backward
            total = buffer.to(partition.device, non_blocking=True)
        last = self.is_gradient_accumulation_boundary()
        if total is None:  # the partition's memory is about to be used again
            total = partition.to(buffer.dtype, copy=not last)
        else:
            total.add_(partition)
        self._peftds_squares[param.ds_id] = torch.linalg.vector_norm(total, dtype=torch.float64).square()
        if last:
            buffer.copy_(total, non_blocking=True)
        else:
            self._peftds_totals[param.ds_id] = total

    def _hand_over(self) -> None:
        """Show the host what a window has gathered on the device so far."""
        for group in self.fp16_groups:
            for param in group:
                total = self._peftds_totals.get(param.ds_id)
                if total is not None:
                    self._partition_buffer(param).narrow(0, 0, total.numel()).copy_(total)

    def _refresh_fp32_grad(self, param: Any, buffer: Tensor) -> None:
        """Let a new gradient replace what was set for this parameter earlier in the window."""
        sub_group_id, offset, _ = self.grad_position[self.get_param_id(param)]
        fp32_grad = self.fp32_partitioned_groups_flat[sub_group_id].grad
        if fp32_grad is not None:
            self._sync_gradients()  # which hands over as well
            fp32_grad.narrow(0, offset, buffer.numel()).copy_(buffer)

    def _partition_buffer(self, param: Any) -> Tensor:
        buffer: Tensor = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[param.ds_id]
        return buffer

    def _finalize_offload_gradient_accumulation(self) -> None:
        """Nothing is deferred to the boundary here."""
        if not self._keeps_gradients:
            super()._finalize_offload_gradient_accumulation()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard what the window has gathered so far, too."""
        super().zero_grad(set_to_none=set_to_none)
        if self._keeps_gradients and (self._peftds_step_failed or not self._peftds_window_over):
            self._start_window()

    # ---- step -------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Step and end the window. Its gradients stay readable (AdaLoRA reads them) until the next comes.

        A step that has failed can be made again with the same gradients.
        """
        if not self._keeps_gradients:
            super().step(closure)
            return
        if self._peftds_step_failed:
            self._peftds_window_over = False
        self._leave_finished_window()
        self._zero_untouched()
        self._sync_gradients()
        self._peftds_totals.clear()
        self._peftds_applied_scale = 1.0
        self._peftds_step_failed = True
        try:
            super().step(closure)
            self._peftds_step_failed = False
        finally:
            self._peftds_window_over = True

    def _zero_untouched(self) -> None:
        """Wipe what an earlier window left in the buffers of parameters without a gradient."""
        for group in self.fp16_groups:
            for param in group:
                if param.ds_id not in self._peftds_squares:
                    self._partition_buffer(param).zero_()

    def _leave_finished_window(self) -> None:
        if self._peftds_window_over:
            self._start_window()

    def _start_window(self) -> None:
        self._peftds_window_over = self._peftds_step_failed = False
        self._peftds_squares.clear()
        self._peftds_totals.clear()
        self._peftds_norms = None
        for master in self.fp32_partitioned_groups_flat:
            master.grad = None

    # ---- norm and overflow ------------------------------------------------------------------

    def _squared_norms(self) -> Tensor:
        """Return the sum of squares of each sub-group over all ranks, fp64 on the host."""
        if self._peftds_norms is None:
            from deepspeed import comm as dist
            from deepspeed.accelerator import get_accelerator

            local = [self._local_squared_norm(i) for i in range(len(self.fp16_groups))]
            norms = torch.stack(local).to(get_accelerator().current_device_name())
            dist.all_reduce(norms, op=dist.ReduceOp.SUM, group=self._one_process_group())
            self._peftds_norms = norms.cpu()
        return self._peftds_norms

    def _local_squared_norm(self, sub_group_id: int) -> Tensor:
        """Add up what the hand-over summed; a ``.grad`` that somebody set is read again instead."""
        grad = self.fp32_partitioned_groups_flat[sub_group_id].grad
        if grad is not None:
            return ops.squared_norm(grad)
        squares = (self._peftds_squares.get(param.ds_id) for param in self.fp16_groups[sub_group_id])
        found = [value for value in squares if value is not None]
        return torch.stack(found).sum().cpu() if found else torch.zeros((), dtype=torch.float64)

    def _one_process_group(self) -> Any:
        """Return the group that holds all partitions, or None if sub-groups or model parallelism differ."""
        first = self._get_sub_group_process_group(0)
        others = (self._get_sub_group_process_group(i) for i in range(1, len(self.fp16_groups)))
        same = all(group is first for group in others)
        return first if same and self.model_parallel_group is None else None

    def _fuses_norm(self) -> bool:
        return bool(self._keeps_gradients and self.fp16_groups and self._one_process_group() is not None)

    def _get_norm_groups(self) -> list[Tensor]:
        """Return each sub-group's gradient norm (of scaled gradients); -1 where it is not finite."""
        if self._fuses_norm():
            norms = self._squared_norms().sqrt().float()
            return list(torch.where(torch.isfinite(norms), norms, -torch.ones_like(norms)))
        if self._keeps_gradients:
            for i, group in enumerate(self.fp16_groups):
                self._fill_param_norms(i, group)
        norm_groups: list[Tensor] = super()._get_norm_groups()
        return norm_groups

    def _fill_param_norms(self, sub_group_id: int, group: list[Any]) -> None:
        """Give stock's norm what it reads: the norm of each parameter's own partition."""
        gradient = self._gradient(sub_group_id)
        for param in group:
            _, offset, numel = self.grad_position[self.get_param_id(param)]
            squared = ops.squared_norm(gradient.narrow(0, offset, numel))
            self.norm_for_param_grads[self.get_param_id(param)] = squared.sqrt()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether any rank's gradients hold Inf or NaN, told from the norm that is needed anyway."""
        if partition_gradients and self._fuses_norm():
            return not bool(torch.isfinite(self._squared_norms()).all())
        return bool(super().has_overflow(partition_gradients))

    # ---- who reads or sets fp32 gradients (deepspeed.utils.tensor_fragment) -------------------

    def get_fp32_grad_partitions(self) -> Any:
        """Return stock's dictionary of fp32 gradients, made for the occasion."""
        if self._keeps_gradients:
            self._materialize_all()
        return super().get_fp32_grad_partitions()

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[Tensor, int]:
        """Return the gradient's partition; in fp32 and writable when it is going to be set."""
        if self._keeps_gradients:
            if not release_swap_buffers:  # DeepSpeed's way to say that the caller is going to write
                self._leave_finished_window()
            self._settle()
            sub_group_id, offset, numel = self.grad_position[self.get_param_id(param)]
            if release_swap_buffers:
                return self._gradient(sub_group_id).narrow(0, offset, numel), sub_group_id
            self._materialize_fp32_grad(sub_group_id)
            self._mark_set(param)
            fp32_grad = self.fp32_partitioned_groups_flat[sub_group_id].grad
            return fp32_grad.narrow(0, offset, numel), sub_group_id
        result: tuple[Tensor, int] = super()._get_fp32_grad_state_partition(param, release_swap_buffers)
        return result

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        """Let the caller's function see and set fp32 gradients."""
        if self._keeps_gradients:
            self._leave_finished_window()
            self._materialize_all()
            for param in param_list:
                if param.requires_grad:
                    self._mark_set(param)
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def _mark_set(self, param: Any) -> None:
        self._peftds_squares.setdefault(param.ds_id, torch.zeros((), dtype=torch.float64))
        self._peftds_norms = None

    def _settle(self) -> None:
        """Make what is stored what a reader expects: after a step, gradients as the step used them."""
        self._sync_gradients()
        if not self._peftds_window_over:
            self._zero_untouched()
        elif self._peftds_applied_scale != 1.0:
            for sub_group_id, master in enumerate(self.fp32_partitioned_groups_flat):
                self._materialize_fp32_grad(sub_group_id)
                master.grad.mul_(self._peftds_applied_scale)
            self._peftds_applied_scale = 1.0

    def _materialize_all(self) -> None:
        self._settle()
        for sub_group_id in range(len(self.fp16_groups)):
            self._materialize_fp32_grad(sub_group_id)

    def _sync_gradients(self) -> None:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()
        self._hand_over()
