# SPDX-License-Identifier: Apache-2.0
"""Which ZeRO stages allow a placement of states. The rules are those of DeepSpeed 0.19.8."""

from __future__ import annotations

from typing import Final

from peftds_ext.errors import ConfigError
from peftds_ext.planner.memory import Place, Training

STAGES: Final = (0, 1, 2, 3)


def permitted_stages(training: Training) -> tuple[int, ...]:
    """Return the stages that allow the placement, in ascending order; stage 3 allows every one."""
    return tuple(stage for stage in STAGES if _objection(training, stage) is None)


def check_stage(training: Training, stage: int) -> None:
    """Refuse a placement that DeepSpeed refuses, or reads and does not carry out, at ``stage``.

    Raises:
        ConfigError: the message names the option of ``peftds plan`` and the stages that allow its value.
    """
    if objection := _objection(training, stage):
        raise ConfigError(objection)


def _objection(training: Training, stage: int) -> str | None:
    param, optimizer = training.param_device, training.optimizer_device
    # offload_config.py: "Valid only with stage 3"; engine.py hands offload_param to stage 3 alone.
    if param is not Place.GPU and stage < 3:
        return (
            f"--param-device {param.value} needs ZeRO stage 3, got --stage {stage}: "
            f"pass --stage 3, or --param-device gpu"
        )
    # offload_config.py: "Valid with stage 1, 2, and 3".
    if optimizer is Place.CPU and stage < 1:
        return (
            f"--optimizer-device cpu needs ZeRO stage 1 or more, got --stage {stage}: "
            f"raise --stage, or pass --optimizer-device gpu"
        )
    # stage_1_and_2.py, __init__: any device but "none" is host memory there; the swapper is in stage3.py.
    if optimizer is Place.NVME and stage < 3:
        return (
            f"--optimizer-device nvme needs ZeRO stage 3, got --stage {stage}, at which DeepSpeed writes "
            f"nothing to NVMe: pass --stage 3, or another --optimizer-device"
        )
    # engine.py, _do_optimizer_sanity_check: "unsupported mix" of dtypes without ZeRO.
    if stage == 0 and training.accumulation_dtype is not training.dtype:
        return (
            f"--grad-dtype {training.accumulation_dtype.value} with --dtype {training.dtype.value} needs "
            f"ZeRO stage 1 or more, got --stage 0: raise --stage, or leave --grad-dtype out"
        )
    return None
