# SPDX-License-Identifier: Apache-2.0
"""Stands in for the ``cpu_adam`` op that DeepSpeed compiles at run time.

``DeepSpeedCPUAdam`` stays the optimizer's class, because DeepSpeed compares types exactly; only the
object behind its ``ds_opt_adam`` attribute changes, so every path that steps that optimizer (ZeRO-1,
2 and 3) runs our kernel, and nothing is compiled. Signatures follow ``deepspeed/ops/adam/cpu_adam.py``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from peftds_ext import ops
from peftds_ext.integrations.deepspeed.switch import is_engine_enabled

logger = logging.getLogger("peftds_ext")


class StockCpuAdam:
    """DeepSpeed's own op, built when it is first needed instead of when the optimizer is made.

    An optimizer can be made before the configuration is known (Accelerate does so), and only the
    configuration says whether the stock op is wanted.
    """

    def __init__(self, builder: type) -> None:
        self._builder = builder
        self._create_arguments: tuple[Any, ...] | None = None
        self._op: Any = None

    def create_adam(self, *arguments: Any) -> None:
        """Remember how the optimizer was created."""
        self._create_arguments = arguments

    def destroy_adam(self, opt_id: int) -> None:
        """Forget the optimizer, if the op was ever built."""
        if self._op is not None:
            self._op.destroy_adam(opt_id)

    def load(self) -> Any:
        """Build or load the op, once."""
        if self._op is None:
            self._op = self._builder().load()
            if self._create_arguments is not None:
                self._op.create_adam(*self._create_arguments)
        return self._op

    def adam_update(self, *arguments: Any) -> None:
        """Run DeepSpeed's step."""
        self.load().adam_update(*arguments)

    def adam_rollback(self, *arguments: Any) -> None:
        """Run DeepSpeed's rollback (SuperOffload only)."""
        self.load().adam_rollback(*arguments)


class KernelCpuAdam:
    """Our kernel behind the interface of DeepSpeed's op.

    Parameters or moments that are not fp32 (16-bit master weights) go to ``stock``, and the log says
    so once.
    """

    def __init__(self, stock: Any, adamw_mode: bool = True) -> None:
        self._stock = stock
        self._adamw_mode = adamw_mode
        self._announced = False

    def create_adam(self, *arguments: Any) -> None:
        """Take (opt_id, lr, beta1, beta2, eps, weight_decay, adamw_mode, should_log)."""
        self._adamw_mode = bool(arguments[6])
        self._stock.create_adam(*arguments)

    def destroy_adam(self, opt_id: int) -> None:
        """Nothing of ours is left behind; DeepSpeed's op is told, if it was built."""
        self._stock.destroy_adam(opt_id)

    def adam_update(
        self,
        opt_id: int,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
    ) -> None:
        """Update ``param`` and the moments in place.

        Raises:
            RuntimeError: a tensor is not contiguous (DeepSpeed's op would update a copy and lose it).
        """
        if not all(t.dtype is torch.float32 for t in (param, exp_avg, exp_avg_sq)):
            if not self._announced:
                logger.warning(
                    "parameters or Adam moments are not fp32: DeepSpeed's own cpu_adam op steps them"
                )
                self._announced = True
            self._stock.adam_update(
                opt_id,
                step,
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                bias_correction,
                param,
                grad,
                exp_avg,
                exp_avg_sq,
            )
            return
        ops.adamw_step_(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            lr=float(lr),
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            adamw_mode=self._adamw_mode,
            bias_correction=bool(bias_correction),
        )

    def adam_rollback(self, *arguments: Any) -> None:
        """Run DeepSpeed's rollback (SuperOffload only, which is refused earlier)."""
        self._stock.adam_rollback(*arguments)


def stand_in_builder(stock_builder: type) -> type:
    """Return a class with the one method of an op builder that DeepSpeedCPUAdam calls."""

    class CPUAdamBuilder:
        def load(self, verbose: bool = True) -> StockCpuAdam | KernelCpuAdam:
            stock = StockCpuAdam(stock_builder)
            return KernelCpuAdam(stock) if is_engine_enabled() else stock

    return CPUAdamBuilder


def use_kernel(optimizer: Any, stock_builder: type) -> None:
    """Put our kernel behind a DeepSpeedCPUAdam that exists already; others are left alone."""
    op = getattr(optimizer, "ds_opt_adam", None)
    if op is None or isinstance(op, KernelCpuAdam):
        return
    if not isinstance(op, StockCpuAdam):  # made before install(): the op is built and holds a record
        loaded = op
        op = StockCpuAdam(stock_builder)
        op._op = loaded
    optimizer.ds_opt_adam = KernelCpuAdam(op, adamw_mode=optimizer.adam_w_mode)
