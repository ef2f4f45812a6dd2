# SPDX-License-Identifier: Apache-2.0
"""Turns a client's torch Adam or AdamW into the DeepSpeedCPUAdam that optimizer offload asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from peftds_ext.errors import ConfigError
from peftds_ext.integrations.deepspeed.offload import offloads_optimizer

logger = logging.getLogger("peftds_ext")

_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")


def adapt(optimizer: Any, raw: Mapping[str, Any]) -> Any:
    """Return the optimizer to hand to DeepSpeed.

    A torch ``Adam`` or ``AdamW`` (``FusedAdamW`` included) under optimizer offload becomes a
    DeepSpeedCPUAdam that shares its parameter groups, so that learning-rate schedulers made for the
    client's optimizer still act. Anything else, and everything when
    ``zero_force_ds_cpu_optimizer`` is false, is returned as it is.

    Raises:
        ConfigError: a group asks for what DeepSpeedCPUAdam cannot do.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return optimizer
    if not offloads_optimizer(raw) or raw.get("zero_force_ds_cpu_optimizer", True) is False:
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adamw = {_is_adamw(optimizer, group) for group in optimizer.param_groups}
    asked = sorted({key for group in optimizer.param_groups for key in _UNSUPPORTED if group.get(key)})
    if asked or len(adamw) != 1:
        what = ", ".join(asked) or "Adam and AdamW groups in one optimizer"
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} with {what} cannot run under optimizer offload; leave "
            'that out, or set "zero_force_ds_cpu_optimizer": false to keep your optimizer and its own step'
        )
    defaults = optimizer.defaults
    adapted = DeepSpeedCPUAdam(
        optimizer.param_groups,
        lr=float(defaults["lr"]),
        betas=defaults["betas"],
        eps=defaults["eps"],
        weight_decay=defaults["weight_decay"],
        adamw_mode=adamw.pop(),
    )
    _share_groups(optimizer, adapted)
    logger.info("%s becomes DeepSpeedCPUAdam for optimizer offload", type(optimizer).__name__)
    return adapted


def _share_groups(client: torch.optim.Optimizer, adapted: torch.optim.Optimizer) -> None:
    """Keep schedulers of the client's optimizer in effect, also after a checkpoint is loaded."""

    def follow(loaded: torch.optim.Optimizer) -> None:  # loading makes new dictionaries
        client.param_groups = loaded.param_groups

    follow(adapted)
    adapted.register_load_state_dict_post_hook(follow)
    client._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn that it never steps


def _is_adamw(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    default = isinstance(optimizer, torch.optim.AdamW)
    return bool(group.get("decoupled_weight_decay", default))
