# SPDX-License-Identifier: Apache-2.0
"""Which DeepSpeed features exclude the engine, checked against DeepSpeed's own reading of the keys."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from peftds_ext.config import PeftdsConfig
from peftds_ext.errors import ConflictError
from peftds_ext.integrations.deepspeed.conflicts import check_conflicts, find_conflicts

deepspeed = pytest.importorskip("deepspeed")


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def _offload(**keys: Any) -> dict[str, Any]:
    return _zero(offload_optimizer={"device": "cpu", **keys})


ON: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "zero_optimization.zenflow": (
        _zero(zenflow={"topk_ratio": 0.1}),
        lambda config: config.zero_config.zenflow is not None,
    ),
    "zero_optimization.offload_optimizer.super_offload": (
        _offload(super_offload=True),
        lambda config: config.zero_config.offload_optimizer.super_offload,
    ),
    "compile.deepcompile": (
        {"compile": {"deepcompile": True}},
        lambda config: config.compile_config.deepcompile,
    ),
    "hybrid_engine.enabled": (
        {"hybrid_engine": {"enabled": True}},
        lambda config: config.hybrid_engine.enabled,
    ),
    "expert_parallel.enabled": (
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
        lambda config: config.expert_parallel_config.enabled,
    ),
    "tensor_parallel.autotp_size": (
        {"tensor_parallel": {"autotp_size": 2}},
        lambda config: config.tensor_parallel_config.autotp_size > 1,
    ),
}

OFF: list[dict[str, Any]] = [
    {},
    {"zero_optimization": True},
    _zero(),
    _zero(zenflow=None),
    _zero(offload_optimizer=None),
    _offload(super_offload=False),
    {"compile": {"deepcompile": False}},
    {"compile": {}},
    {"hybrid_engine": {"enabled": False}},
    {"expert_parallel": {"enabled": False, "autoep_size": 2}},
    {"expert_parallel": {}},
    {"tensor_parallel": {"autotp_size": 0}},
    {"tensor_parallel": {"autotp_size": 1}},
]

HARMLESS: list[dict[str, Any]] = [
    _offload(ratio=0.5),
    _zero(zero_hpz_partition_size=2),
    _zero(zero_quantized_weights=True, zero_quantized_gradients=True),
    {**_zero(), "optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
    {**_offload(), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
]


def _deepspeed_reads(raw: dict[str, Any]) -> Any:
    return deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **raw})


def _keys(raw: dict[str, Any]) -> list[str]:
    return [conflict.key for conflict in find_conflicts(raw)]


@pytest.mark.parametrize("key", ON)
def test_feature_that_deepspeed_switches_on_is_found(key: str) -> None:
    raw, is_on = ON[key]
    assert is_on(_deepspeed_reads(raw)), "the key in this test is not DeepSpeed's"
    assert _keys(raw) == [key]


@pytest.mark.parametrize("raw", OFF, ids=str)
def test_feature_that_deepspeed_leaves_off_is_no_conflict(raw: dict[str, Any]) -> None:
    config = _deepspeed_reads(raw)
    if config.zero_config.offload_optimizer is not None:
        assert not config.zero_config.offload_optimizer.super_offload
    assert config.zero_config.zenflow is None
    assert not config.compile_config.deepcompile
    assert _keys(raw) == []


@pytest.mark.parametrize("raw", HARMLESS, ids=str)
def test_feature_that_the_engine_lives_with_is_no_conflict(raw: dict[str, Any]) -> None:
    assert _keys(raw) == []


@pytest.mark.parametrize("value", ["true", 1, "on"])
def test_other_spellings_of_true_count(value: object) -> None:
    raw = _offload(super_offload=value)
    assert _deepspeed_reads(raw).zero_config.offload_optimizer.super_offload is True
    assert _keys(raw) == ["zero_optimization.offload_optimizer.super_offload"]


def test_empty_zenflow_section_counts() -> None:
    raw = _zero(zenflow={})
    assert _deepspeed_reads(raw).zero_config.zenflow is not None
    assert _keys(raw) == ["zero_optimization.zenflow"]


@pytest.mark.parametrize(
    "raw",
    [
        _zero(zenflow={"enabled": False}),
        _zero(zenflow="auto"),
        {"compile": "yes"},
        {"tensor_parallel": {"autotp_size": "two"}},
        {"tensor_parallel": {"autotp_size": None}},
        _offload(super_offload="auto"),
    ],
    ids=str,
)
def test_value_that_deepspeed_drops_or_refuses_is_left_to_it(raw: dict[str, Any]) -> None:
    assert _keys(raw) == []


def test_no_conflict_lets_the_engine_run(caplog: pytest.LogCaptureFixture) -> None:
    assert check_conflicts(_offload(), PeftdsConfig(enabled=True)) is True
    assert not caplog.records


def test_error_names_every_key_and_remedy() -> None:
    raw = _zero(zenflow={}) | {"compile": {"deepcompile": True}}
    with pytest.raises(ConflictError) as caught:
        check_conflicts(raw, PeftdsConfig(enabled=True))
    message = str(caught.value)
    for conflict in find_conflicts(raw):
        assert conflict.key in message
        assert conflict.remedy in message
    assert "peftds_ext.on_conflict" in message


def test_stock_warns_once_and_keeps_the_engine_off(caplog: pytest.LogCaptureFixture) -> None:
    raw = _zero(zenflow={}) | {"compile": {"deepcompile": True}}
    with caplog.at_level(logging.WARNING, logger="peftds_ext"):
        assert check_conflicts(raw, PeftdsConfig(enabled=True, on_conflict="stock")) is False
    (record,) = [item for item in caplog.records if item.name == "peftds_ext"]
    assert record.levelno == logging.WARNING
    assert "zero_optimization.zenflow" in record.getMessage()
    assert "compile.deepcompile" in record.getMessage()
