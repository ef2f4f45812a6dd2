# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed features, chosen in the configuration, that cannot run together with the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from peftds_ext.config import SECTION, PeftdsConfig
from peftds_ext.errors import ConflictError
from peftds_ext.integrations.deepspeed.offload import offloads_parameters_to_nvme

_logger = logging.getLogger("peftds_ext")
_BOOL: Final = TypeAdapter(bool)
_INT: Final = TypeAdapter(int)


@dataclass(frozen=True)
class Conflict:
    """One feature that excludes the engine."""

    key: str
    """The key in the DeepSpeed configuration that switches it on, with dots between the levels."""
    reason: str
    remedy: str


@dataclass(frozen=True)
class _Rule:
    conflict: Conflict
    is_on: Callable[[object], bool]
    concerns: Callable[[Mapping[str, Any]], bool] = lambda raw: True
    """Whether the feature matters at all with this configuration."""


def _is_true(value: object) -> bool:
    """Tell whether DeepSpeed's own model reads the value as true; what it refuses is its error to raise."""
    try:
        return _BOOL.validate_python(value)
    except ValidationError:
        return False


def _is_above_one(value: object) -> bool:
    try:
        return _INT.validate_python(value) > 1
    except ValidationError:
        return False


def _is_present(value: object) -> bool:
    """For a feature that a section switches on by being there, even when it is empty."""
    if isinstance(value, Mapping):
        return _is_true(value.get("enabled", True))
    return value not in (None, False, "auto")


_RULES: Final = (
    _Rule(
        Conflict(
            "zero_optimization.zenflow",
            "ZenFlow replaces the gradient and step methods that the engine overrides",
            'remove "zenflow" from "zero_optimization"',
        ),
        _is_present,
    ),
    _Rule(
        Conflict(
            "zero_optimization.offload_optimizer.super_offload",
            "SuperOffload puts its own ZeRO-3 optimizer in the place of the engine's",
            'set "super_offload" to false',
        ),
        _is_true,
    ),
    _Rule(
        Conflict(
            "compile.deepcompile",
            "DeepCompile takes the fetching of parameters and the reduction of gradients into the graph",
            'set "deepcompile" to false; plain torch.compile may stay',
        ),
        _is_true,
    ),
    _Rule(
        Conflict(
            "hybrid_engine.enabled",
            "the hybrid engine gathers and replaces parameters behind the back of the ZeRO-3 optimizer",
            'set "enabled" to false in "hybrid_engine"',
        ),
        _is_true,
    ),
    _Rule(
        Conflict(
            "expert_parallel.enabled",
            "expert parallelism partitions each expert over its own process group",
            'set "enabled" to false in "expert_parallel"',
        ),
        bool,  # DeepSpeed does not convert this one: it goes by the truth of the value
    ),
    _Rule(
        Conflict(
            "aio.use_gds",
            "GPUDirect Storage reads parameters past the storage engine that has written them",
            'set "use_gds" to false in "aio"',
        ),
        _is_true,
        offloads_parameters_to_nvme,
    ),
    _Rule(
        Conflict(
            "zero_optimization.offload_optimizer.fast_init",
            "it reads master weights from one file per parameter, which the storage engine does not make",
            'set "fast_init" to false',
        ),
        _is_true,
        offloads_parameters_to_nvme,
    ),
    _Rule(
        Conflict(
            "tensor_parallel.autotp_size",
            "tensor parallelism shards the weights that the engine partitions",
            'set "autotp_size" to 0 or 1',
        ),
        _is_above_one,
    ),
)


def find_conflicts(raw: Mapping[str, Any]) -> list[Conflict]:
    """Return the features that exclude the engine and are switched on in a raw DeepSpeed configuration.

    A feature that is there but switched off, or whose value DeepSpeed is going to refuse, is none.
    Features chosen in code (a ``PipelineModule``, MoE layers, ``deepspeed.tp_model_init``) are not seen here.
    """
    on = (rule for rule in _RULES if rule.concerns(raw) and rule.is_on(_get(raw, rule.conflict.key)))
    return [rule.conflict for rule in on]


def check_conflicts(raw: Mapping[str, Any], config: PeftdsConfig) -> bool:
    """Return whether the engine may run with this DeepSpeed configuration.

    With ``on_conflict="stock"`` a conflict is one warning in the log and False.

    Raises:
        ConflictError: there is a conflict and ``on_conflict`` is ``"error"``; each key is named.
    """
    conflicts = find_conflicts(raw)
    if not conflicts:
        return True
    text = "; ".join(f"{item.key}: {item.reason} ({item.remedy})" for item in conflicts)
    if config.on_conflict == "error":
        raise ConflictError(
            f"the engine cannot run with this DeepSpeed configuration: {text}. "
            f'Or set {SECTION}.on_conflict to "stock" to train with stock DeepSpeed'
        )
    _logger.warning("the engine is off and stock DeepSpeed trains: %s", text)
    return False


def _get(raw: Mapping[str, Any], key: str) -> object:
    value: object = raw
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value
