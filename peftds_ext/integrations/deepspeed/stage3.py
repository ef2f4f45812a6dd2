# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with optimizer offload: gradients keep their dtype, and the step is one pass.

Stock DeepSpeed copies each gradient to fp32, scales it, runs Adam and casts the result, which is 42
bytes per element in three passes over memory (deepspeed/runtime/zero/stage3.py: ``partition_grads``,
``unscale_and_clip_grads``, ``_optimizer_step``, ``_reassign_or_swap_out_partitioned_parameters``).
Here the gradient stays where it was first put, in ``grad_partitions_flat_buffer``; the norm is one
read of it; and one kernel per sub-group unscales, clips, updates and writes the low-precision weight:
28 bytes per element; less where states are compact.

The classes are mix-ins over ``DeepSpeedZeroOptimizer_Stage3``. A sub-group that is not ours goes to
``super()`` method by method; when the gradients' path is not ours, all of it is stock's and the fp32
``.grad`` that stock keeps is what the kernel reads. So ``.grad``, where there is one, always holds the
gradient; where there is none, the flat buffer does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peftds_ext import ops
from peftds_ext.integrations.deepspeed.param_swapper import ParameterSwapper

if TYPE_CHECKING:
    from peftds_ext.integrations.deepspeed._stage3_seam import Stage3Seam
else:
    Stage3Seam = object

logger = logging.getLogger("peftds_ext")

_KERNEL_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class FusedStep(Stage3Seam):
    """The optimizer step of each sub-group in one pass (unscale, clip, Adam, low-precision write)."""

    # Between two methods of one sub-group's step: the gradient's factor, and where the kernel wrote.
    _peftds_grad_scale: float | None
    _peftds_written: Tensor | None

    def _why_not_fused(self, sub_group_id: int) -> str:
        """Return why stock steps this sub-group, or "" if the kernel does."""
        if self.subgroup_to_device[sub_group_id] != "cpu":
            return "it is updated on the accelerator (offload ratio below 1)"
        if self.swap_optimizer:
            return "its optimizer states are with DeepSpeed's own swapper"
        return self._why_not_steppable(sub_group_id)

    def _why_not_steppable(self, sub_group_id: int) -> str:
        """Return why the kernel cannot step this sub-group wherever its states are, or ""."""
        if reason := why_no_kernel(self):
            return reason
        dtypes = self._low_precision_dtypes(sub_group_id)
        if len(dtypes) > 1 or not dtypes <= _KERNEL_DTYPES:
            return f"the kernel does not write parameters of {', '.join(sorted(map(str, dtypes)))} at once"
        if not self._in_one_buffer(sub_group_id) and not self._has_our_swapper(sub_group_id):
            return "its parameters are with DeepSpeed's own NVMe swapper"
        return ""

    def _in_one_buffer(self, sub_group_id: int) -> bool:
        """Whether the sub-group's low-precision weights lie together in memory; on NVMe they do not."""
        return self.fp16_partitioned_groups_flat[sub_group_id] is not None

    def _low_precision_dtypes(self, sub_group_id: int) -> set[torch.dtype]:
        if self._in_one_buffer(sub_group_id):
            return {self.fp16_partitioned_groups_flat[sub_group_id].dtype}
        return {partition.dtype for partition in self.fp16_partitioned_groups[sub_group_id]}

    def _has_our_swapper(self, sub_group_id: int) -> bool:
        return isinstance(self.fp16_groups[sub_group_id][0].nvme_swapper, ParameterSwapper)

    def _fuses(self, sub_group_id: int) -> bool:
        """Whether the kernel steps this sub-group now; the log says so once when it does not."""
        if not self.offload_optimizer:
            return False
        reason = self._why_not_fused(sub_group_id)
        if not reason and has_step_hooks(self.optimizer):
            reason = "step hooks are registered on the optimizer"
        if reason:
            self._say_once(f"stock DeepSpeed steps sub-group {sub_group_id}: {reason}")
        return not reason

    def _say_once(self, message: str) -> None:
        said: set[str] = self.__dict__.setdefault("_peftds_said", set())
        if message not in said:
            said.add(message)
            logger.info(message)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Keep the factor for the kernel instead of multiplying the gradients by it."""
        if not self._fuses(sub_group_id):
            self._materialize_fp32_grad(sub_group_id)
            super().unscale_and_clip_grads(sub_group_id, total_norm)
            return
        scale = float(self.loss_scale)
        if self.clip_grad > 0.0:
            scale *= max(1.0, (float(total_norm) / scale + 1e-6) / self.clip_grad)
        self._peftds_grad_scale = self._peftds_applied_scale = 1.0 / scale

    def _optimizer_step(self, sub_group_id: int) -> None:
        """Run the kernel on one sub-group, where its states are."""
        grad_scale, self._peftds_grad_scale = self.__dict__.get("_peftds_grad_scale"), None
        if grad_scale is None:  # unscale_and_clip_grads left this sub-group to stock
            super()._optimizer_step(sub_group_id)
            return
        settings = {**self._adam_settings(sub_group_id), "grad_scale": grad_scale}
        gradient, target = self._gradient(sub_group_id), self._write_target(sub_group_id)
        self._apply(sub_group_id, gradient, target, settings)
        self.optimizer._opt_called = True  # what torch's schedulers look for
        self._peftds_written = target

    def _apply(
        self,
        sub_group_id: int,
        gradient: Tensor,
        target: Tensor,
        settings: dict[str, Any],
        done: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Step one sub-group; ``done`` is told of how many of its elements are done, as they come to be."""
        if self._is_stored(sub_group_id):
            self._peftds_states.step(sub_group_id, gradient, target, settings, done)
        else:
            self._step_in_memory(sub_group_id, gradient, target, settings)
            done(target.numel())

    def _step_in_memory(
        self, sub_group_id: int, gradient: Tensor, target: Tensor, settings: dict[str, Any]
    ) -> None:
        """Step where DeepSpeed keeps the master, and DeepSpeedCPUAdam the moments."""
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        state = self.optimizer.state[master]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(master, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(master, requires_grad=False)
        state["step"] += 1
        moments = state["exp_avg"], state["exp_avg_sq"]
        with torch.no_grad():
            ops.adamw_step_(master.data, gradient, *moments, target, **settings, step=int(state["step"]))

    def _adam_settings(self, sub_group_id: int) -> dict[str, Any]:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        return adam_settings(group, adamw_mode=self.optimizer.adam_w_mode)

    def _is_stored(self, sub_group_id: int) -> bool:
        """Whether the sub-group's states are elsewhere than DeepSpeed has them (see stage3_states.py)."""
        return False

    def peftds_state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank's masters and moments in ``"memory"`` and on ``"disk"``."""
        if self.__dict__.get("_peftds_states") is not None:
            found: dict[str, int] = self._peftds_states.usage()
            return found
        masters = self.fp32_partitioned_groups_flat
        states = [self.optimizer.state.get(master, {}) for master in masters]
        tensors = [
            *masters,
            *(value for state in states for value in state.values() if torch.is_tensor(value)),
        ]
        return {"memory": sum(tensor.nbytes for tensor in tensors), "disk": 0}

    def _write_target(self, sub_group_id: int) -> Tensor:
        """Return host memory that receives the low-precision weights: their own, or a staging buffer."""
        if not self._in_one_buffer(sub_group_id):
            (dtype,) = self._low_precision_dtypes(sub_group_id)
            swapper: ParameterSwapper = self.fp16_groups[sub_group_id][0].nvme_swapper
            return swapper.staging(self.fp16_partitioned_groups_flat_numel[sub_group_id], dtype)
        flat: Tensor = self.fp16_partitioned_groups_flat[sub_group_id]
        if flat.device.type == "cpu":
            return flat
        staging: dict[int, Tensor] = self.__dict__.setdefault("_peftds_staging", {})
        if sub_group_id not in staging:
            pin = bool(self.offload_optimizer_pin_memory)
            staging[sub_group_id] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=pin)
            staging[sub_group_id].copy_(flat)  # of a split master it is a part
        return staging[sub_group_id]

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Skip the cast that the kernel has done already."""
        written, self._peftds_written = self.__dict__.get("_peftds_written"), None
        if written is None:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
            return
        if not self._in_one_buffer(sub_group_id):
            sizes = [partition.ds_numel for partition in self.fp16_partitioned_groups[sub_group_id]]
            for param, values in zip(self.fp16_groups[sub_group_id], written.split(sizes), strict=True):
                param.nvme_swapper.update_partition(param, values)
            return
        flat = self.fp16_partitioned_groups_flat[sub_group_id]
        if flat is not written:
            flat.copy_(written)
        self._unflatten_partitioned_parameters(sub_group_id)

    def _gradient(self, sub_group_id: int) -> Tensor:
        """Return the sub-group's gradient: its fp32 ``.grad`` if there is one, else the flat buffer."""
        grad: Tensor | None = self.fp32_partitioned_groups_flat[sub_group_id].grad
        return self._flat_gradient(sub_group_id) if grad is None else grad

    def _flat_gradient(self, sub_group_id: int) -> Tensor:
        numels = self.fp16_partitioned_groups_flat_numel
        start = sum(numels[:sub_group_id])
        flat: Tensor = self.grad_partitions_flat_buffer.narrow(0, start, numels[sub_group_id])
        return flat

    def _materialize_fp32_grad(self, sub_group_id: int) -> None:
        """Give stock code the fp32 ``.grad`` that it reads or writes, until the step's end."""
        master = self.fp32_partitioned_groups_flat[sub_group_id]
        if self.offload_optimizer and master.grad is None and not self.swap_optimizer:
            master.grad = self._flat_gradient(sub_group_id).to(
                device=master.device, dtype=master.dtype, copy=True
            )


def adam_settings(group: Mapping[str, Any], *, adamw_mode: bool) -> dict[str, Any]:
    """Return what DeepSpeedCPUAdam's parameter group says, as ``ops.adamw_step_`` takes it."""
    return {
        "lr": float(group["lr"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "adamw_mode": adamw_mode,
        "bias_correction": bool(group["bias_correction"]),
    }


def why_no_kernel(zero: Any) -> str:
    """Return why the kernel cannot do what the optimizer of a ZeRO optimizer of any stage does, or ""."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if type(zero.optimizer) is not DeepSpeedCPUAdam:
        return f"the optimizer is {type(zero.optimizer).__name__}, not DeepSpeedCPUAdam"
    if not zero.optimizer.fp32_optimizer_states or zero.master_weights_and_grads_dtype is not torch.float32:
        return "master weights or Adam moments are not fp32"
    if zero.torch_autocast_gradscaler is not None:
        return "torch's GradScaler steps the optimizer"
    return ""


def has_step_hooks(optimizer: Any) -> bool:
    """Whether somebody wants to be called around ``optimizer.step()``, which the kernel does not call."""
    from torch.optim import optimizer as torch_optimizer

    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


@functools.cache
def engine_class(stock: type) -> type:
    """Return the engine's ZeRO-3 optimizer class over DeepSpeed's ``stock`` class."""
    from peftds_ext.integrations.deepspeed.stage3_gradients import LowPrecisionGradients
    from peftds_ext.integrations.deepspeed.stage3_late import LateSteps
    from peftds_ext.integrations.deepspeed.stage3_layers import LayerHooks
    from peftds_ext.integrations.deepspeed.stage3_nvme import BudgetedReuse, NvmeCheckpoints
    from peftds_ext.integrations.deepspeed.stage3_states import StoredStates

    steps = (LateSteps, LowPrecisionGradients, StoredStates, FusedStep)
    parts = (*steps, LayerHooks, BudgetedReuse, NvmeCheckpoints, stock)
    return type("PeftdsZeroOptimizer_Stage3", parts, {})
