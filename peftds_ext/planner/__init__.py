# SPDX-License-Identifier: Apache-2.0
"""Memory arithmetic: what a training run keeps on GPU, host and NVMe, before it is started."""

from __future__ import annotations

from peftds_ext.planner.memory import DType, Holding, Place, StageMemory, State, Training, model_states
from peftds_ext.planner.placement import check_stage, permitted_stages

__all__ = [
    "DType",
    "Holding",
    "Place",
    "StageMemory",
    "State",
    "Training",
    "check_stage",
    "model_states",
    "permitted_stages",
]
