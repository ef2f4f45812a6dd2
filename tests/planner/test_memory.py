# SPDX-License-Identifier: Apache-2.0
"""Model states by hand, and properties that hold for every training."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peftds_ext.errors import ConfigError
from peftds_ext.planner import (
    DType,
    Place,
    StageMemory,
    State,
    Training,
    check_stage,
    model_states,
    permitted_stages,
)

BILLION = 10**9


@st.composite
def trainings(draw: st.DrawFn, **fixed: Any) -> Training:
    parameters = draw(st.integers(1, 10**12))
    per_node = draw(st.integers(1, 16))
    fields: dict[str, Any] = {
        "parameters": parameters,
        "trainable": draw(st.integers(0, parameters)),
        "gpus": per_node * draw(st.integers(1, 16)),
        "gpus_per_node": per_node,
        "dtype": draw(st.sampled_from(DType)),
        "gradient_dtype": draw(st.none() | st.sampled_from(DType)),
        "master": draw(st.booleans()),
        "optimizer_device": draw(st.sampled_from(Place)),
        "param_device": draw(st.sampled_from(Place)),
    }
    return Training(**{**fields, **fixed})


def rank_total(memory: StageMemory, state: State | None = None) -> int:
    return sum(h.rank_bytes for h in memory.holdings if state is None or h.state is state)


def by_state(memory: StageMemory, place: Place) -> list[int]:
    return [memory.bytes_at(place, state) for state in State]


@pytest.mark.parametrize(("stage", "total"), [(0, 84.0), (1, 42.0), (2, 31.5), (3, 21.0)])
def test_seven_billion_parameters_on_four_gpus_without_master(stage: int, total: float) -> None:
    memory = model_states(Training(7 * BILLION, gpus=4, master=False), stage)
    assert memory.bytes_at(Place.GPU) == total * BILLION
    assert memory.bytes_at(Place.CPU) == memory.bytes_at(Place.NVME) == 0


@pytest.mark.parametrize(("stage", "total"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_example_of_the_zero_paper(stage: int, total: float) -> None:
    # Rajbhandari et al. 2020, figure 1: 7.5 B parameters, 64 GPUs, 12 bytes of optimizer state.
    memory = model_states(Training(7_500_000_000, gpus=64), stage)
    assert memory.bytes_at(Place.GPU) / BILLION == pytest.approx(total, abs=0.05)


def test_lora_on_one_gpu_with_frozen_base() -> None:
    training = Training(1_000_000, trainable=1_000, gpus=1, dtype=DType.BF16)
    memory = model_states(training, 3)
    assert by_state(memory, Place.GPU) == [2_000_000, 2_000, 4_000, 4_000, 4_000]


def test_stage_3_offload_splits_between_gpu_and_host() -> None:
    training = Training(
        8_000, trainable=800, gpus=8, gpus_per_node=4, optimizer_device=Place.CPU, param_device=Place.CPU
    )
    memory = model_states(training, 3)
    assert memory.bytes_at(Place.GPU) == 0
    # Per rank 1000 parameters at 2; 100 trainable: gradient 2 + 4, master 4, moments 4 + 4; four ranks.
    assert by_state(memory, Place.CPU) == [8_000, 2_400, 1_600, 1_600, 1_600]


def test_stage_1_offload_still_holds_every_gradient_on_the_gpu() -> None:
    memory = model_states(Training(1_000, gpus=4, optimizer_device=Place.CPU), 1)
    assert by_state(memory, Place.GPU) == [2_000, 2_000, 0, 0, 0]
    assert by_state(memory, Place.CPU) == [2_000, 4_000, 4_000, 4_000, 4_000]


def test_nvme_keeps_states_in_files_and_the_gradient_partition_in_host_memory() -> None:
    training = Training(
        1_000, trainable=100, gpus=2, optimizer_device=Place.NVME, param_device=Place.NVME, dtype=DType.BF16
    )
    memory = model_states(training, 3)
    assert memory.bytes_at(Place.GPU) == 0
    assert by_state(memory, Place.CPU) == [200, 200, 0, 0, 0]
    assert by_state(memory, Place.NVME) == [1_800, 400, 400, 400, 400]


def test_trainable_parameters_beyond_max_in_cpu_go_to_nvme() -> None:
    training = Training(3 * BILLION, gpus=1, param_device=Place.NVME)
    memory = model_states(training, 3)
    assert memory.bytes_at(Place.CPU) == 2 * BILLION
    assert memory.bytes_at(Place.NVME) == 4 * BILLION


def test_partitions_round_up() -> None:
    memory = model_states(Training(10, gpus=4, master=False), 3)
    assert by_state(memory, Place.GPU) == [6, 6, 0, 12, 12]


def test_fp32_parameters_have_a_master_of_their_own_from_stage_1_on() -> None:
    training = Training(100, gpus=1, dtype=DType.FP32)
    masters = [rank_total(model_states(training, stage), State.MASTER) for stage in range(4)]
    assert masters == [0, 400, 400, 400]


def test_fp32_gradients_of_bf16_parameters() -> None:
    training = Training(100, gpus=2, dtype=DType.BF16, gradient_dtype=DType.FP32)
    gradients = [rank_total(model_states(training, stage), State.GRADIENTS) for stage in (1, 2, 3)]
    assert gradients == [600, 200, 200]


def test_fp32_gradients_of_bf16_parameters_under_offload() -> None:
    training = Training(100, gpus=2, dtype=DType.BF16, gradient_dtype=DType.FP32, optimizer_device=Place.CPU)
    on_gpu = [model_states(training, stage).bytes_at(Place.GPU, State.GRADIENTS) for stage in (1, 2, 3)]
    on_host = [model_states(training, stage).bytes_at(Place.CPU, State.GRADIENTS) for stage in (1, 2, 3)]
    assert on_gpu == [400, 200, 0]
    assert on_host == [400, 400, 800]  # both ranks


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"parameters": 0}, "--params"),
        ({"parameters": -1}, "--params"),
        ({"gpus": 0}, "--gpus"),
        ({"trainable": 101}, "--trainable"),
        ({"trainable": -1}, "--trainable"),
        ({"gpus": 6, "gpus_per_node": 4}, "--gpus-per-node"),
        ({"gpus": 4, "gpus_per_node": 8}, "--gpus-per-node"),
        ({"gpus_per_node": 0}, "--gpus-per-node"),
    ],
)
def test_impossible_numbers_are_refused(fields: dict[str, int], option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} "):
        Training(**{"parameters": 100, "gpus": 4, **fields})


@pytest.mark.parametrize("stage", [-1, 4])
def test_unknown_stages_are_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match="--stage"):
        model_states(Training(100, gpus=1), stage)


@pytest.mark.parametrize(
    ("fields", "permitted"),
    [
        ({}, (0, 1, 2, 3)),
        ({"optimizer_device": Place.CPU}, (1, 2, 3)),
        ({"optimizer_device": Place.NVME}, (3,)),
        ({"param_device": Place.CPU}, (3,)),
        ({"param_device": Place.NVME, "optimizer_device": Place.CPU}, (3,)),
        ({"gradient_dtype": DType.FP32}, (1, 2, 3)),
    ],
)
def test_stages_that_a_placement_permits(fields: dict[str, Any], permitted: tuple[int, ...]) -> None:
    assert permitted_stages(Training(100, gpus=1, **fields)) == permitted


@pytest.mark.parametrize(
    ("fields", "stage", "option"),
    [
        ({"param_device": Place.CPU}, 2, "--param-device cpu"),
        ({"param_device": Place.NVME}, 0, "--param-device nvme"),
        ({"optimizer_device": Place.CPU}, 0, "--optimizer-device cpu"),
        ({"optimizer_device": Place.NVME}, 0, "--optimizer-device nvme"),
        ({"optimizer_device": Place.NVME}, 2, "--optimizer-device nvme"),
        ({"gradient_dtype": DType.FP32}, 0, "--grad-dtype fp32"),
    ],
)
def test_refusals_name_option_stage_and_remedy(fields: dict[str, Any], stage: int, option: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_stage(Training(100, gpus=1, **fields), stage)
    message = str(refusal.value)
    assert message.startswith(option)
    assert f"got --stage {stage}" in message
    assert "pass --" in message or "raise --stage" in message


@given(trainings())
def test_a_higher_stage_never_needs_more_gpu_memory(training: Training) -> None:
    stages = permitted_stages(training)
    if training.dtype is DType.FP32:
        # Without ZeRO, fp32 parameters are their own master; with it, they get one.
        stages = tuple(stage for stage in stages if stage > 0)
    totals = [model_states(training, stage).bytes_at(Place.GPU) for stage in stages]
    assert totals == sorted(totals, reverse=True)


@given(trainings())
def test_all_ranks_together_hold_each_state_at_least_once(training: Training) -> None:
    trainable = training.trainable_count
    for stage in permitted_stages(training):
        memory = model_states(training, stage)
        held = {state: rank_total(memory, state) * training.gpus for state in State}
        assert held[State.PARAMETERS] >= training.parameters * training.dtype.itemsize
        assert held[State.GRADIENTS] >= trainable * training.accumulation_dtype.itemsize
        assert held[State.EXP_AVG] >= trainable * 4
        assert held[State.EXP_AVG_SQ] >= trainable * 4
        if training.master and training.dtype is not DType.FP32:
            assert held[State.MASTER] >= trainable * 4


@given(trainings(), st.integers(1, 10**12))
def test_frozen_parameters_add_parameters_alone(training: Training, frozen: int) -> None:
    fields = {**vars(training), "trainable": training.trainable_count}
    more = Training(**{**fields, "parameters": training.parameters + frozen})
    for stage in permitted_stages(training):
        before, after = model_states(training, stage), model_states(more, stage)
        ranks = training.gpus if stage == 3 else 1
        growth = rank_total(after, State.PARAMETERS) - rank_total(before, State.PARAMETERS)
        assert abs(growth * ranks - frozen * training.dtype.itemsize) <= (ranks - 1) * training.dtype.itemsize
        for state in set(State) - {State.PARAMETERS}:
            assert rank_total(after, state) == rank_total(before, state)


@given(trainings(optimizer_device=Place.GPU, param_device=Place.GPU))
def test_without_offload_everything_is_on_the_gpu(training: Training) -> None:
    for stage in permitted_stages(training):
        assert {h.place for h in model_states(training, stage).holdings} == {Place.GPU}


@given(trainings(optimizer_device=Place.CPU))
def test_an_offloaded_optimizer_leaves_no_master_or_moment_on_the_gpu(training: Training) -> None:
    for stage in permitted_stages(training):
        memory = model_states(training, stage)
        for state in (State.MASTER, State.EXP_AVG, State.EXP_AVG_SQ):
            assert memory.bytes_at(Place.GPU, state) == 0


@given(trainings())
def test_host_and_nvme_count_all_ranks_of_a_node(training: Training) -> None:
    alone = Training(**{**vars(training), "gpus_per_node": 1})
    for stage in permitted_stages(training):
        node, rank = model_states(training, stage), model_states(alone, stage)
        assert node.bytes_at(Place.GPU) == rank.bytes_at(Place.GPU)
        for place in (Place.CPU, Place.NVME):
            assert node.bytes_at(place) == rank.bytes_at(place) * training.ranks_per_node
