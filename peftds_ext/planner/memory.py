# SPDX-License-Identifier: Apache-2.0
"""Memory of model states under ZeRO with offload: how many bytes of which state lie where.

Sources. The split by stage is that of Rajbhandari et al., "ZeRO" (2020, arXiv 1910.02054), section 3: with
Adam and N ranks, stage 1 partitions the optimizer states, stage 2 the gradients as well, stage 3 the
parameters as well. What is kept, in which dtype and where, is read from DeepSpeed 0.19.8,
``deepspeed/runtime/zero/stage3.py`` and ``stage_1_and_2.py``; each rule below names its place.

Frozen parameters, the bulk under PEFT, are parameters and nothing else: DeepSpeed gives gradients, master
and moments to ``requires_grad`` parameters only (``_get_trainable_parameter_groups`` in ``stage3.py``,
``is_optimized_parameter`` in ``deepspeed/runtime/utils.py``).

Counted is what DeepSpeed holds through a whole step and what grows with the number of parameters. Not
counted: activations, gathered layers of stage 3, reduce and swap buffers, the fp32 gradient that a step
without offload makes for one group at a time, the host copies that stages 1 and 2 keep while accumulating
over several micro-batches, and fragmentation. Partitions are rounded up to whole elements per rank; the
padding that DeepSpeed adds per parameter or per group (fewer than 2N elements each) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from peftds_ext.errors import ConfigError

FP32_BYTES: Final = 4
MAX_IN_CPU: Final = 1_000_000_000
"""Trainable elements per rank that stay in host memory under NVMe parameters: the default of
``offload_param.max_in_cpu`` (``offload_config.py``). Frozen parameters are never covered by it."""


class State(str, Enum):
    """A model state; the moments have the names that torch gives them."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


class Place(str, Enum):
    """Where bytes lie: device memory, host memory, or files below ``nvme_path``."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


class DType(str, Enum):
    """Floating-point dtype of parameters or gradients."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return FP32_BYTES if self is DType.FP32 else 2


@dataclass(frozen=True)
class Training:
    """What is trained, on how many GPUs, and where its states are placed.

    Args:
        parameters: all elements, frozen ones included.
        gpus: world size, the N of ZeRO. One process per GPU.
        trainable: elements that require a gradient; None means all.
        gpus_per_node: ranks that share a host and its NVMe; None means one node.
        dtype: dtype of the parameters in forward and backward.
        gradient_dtype: dtype in which gradients are accumulated (``data_types.grad_accum_dtype``); None
            means that of the parameters.
        master: whether trainable parameters have an fp32 master. DeepSpeed's ZeRO always keeps one; False
            is the arithmetic of an optimizer that updates the parameters themselves.
        optimizer_device: ``offload_optimizer.device``; takes gradients, master and moments along.
        param_device: ``offload_param.device``.

    Raises:
        ConfigError: a number is out of range; the message names the option of ``peftds plan``.
    """

    parameters: int
    gpus: int
    trainable: int | None = None
    gpus_per_node: int | None = None
    dtype: DType = DType.FP16
    gradient_dtype: DType | None = None
    master: bool = True
    optimizer_device: Place = Place.GPU
    param_device: Place = Place.GPU

    def __post_init__(self) -> None:
        for option, value in (("--params", self.parameters), ("--gpus", self.gpus)):
            if value < 1:
                raise ConfigError(f"{option} is {value}: give at least 1")
        if not 0 <= self.trainable_count <= self.parameters:
            raise ConfigError(
                f"--trainable is {self.trainable_count}, but the model has {self.parameters} parameters: "
                f"give a count between 0 and that, or a percentage"
            )
        if self.ranks_per_node < 1 or self.gpus % self.ranks_per_node:
            raise ConfigError(
                f"--gpus-per-node is {self.ranks_per_node}, which does not divide --gpus {self.gpus}: "
                f"--gpus is the number of GPUs on all nodes together"
            )

    @property
    def trainable_count(self) -> int:
        """Trainable elements."""
        return self.parameters if self.trainable is None else self.trainable

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share one host."""
        return self.gpus if self.gpus_per_node is None else self.gpus_per_node

    @property
    def accumulation_dtype(self) -> DType:
        """Dtype in which gradients are accumulated."""
        return self.dtype if self.gradient_dtype is None else self.gradient_dtype

    @property
    def optimizer_offloaded(self) -> bool:
        """Whether gradients, master and moments leave the GPU."""
        return self.optimizer_device is not Place.GPU

    def partition(self, elements: int) -> int:
        """Elements that one rank keeps of ``elements`` partitioned over all ranks, rounded up."""
        return -(-elements // self.gpus)


@dataclass(frozen=True)
class Holding:
    """Bytes that one rank keeps of one state in one place; a state may have several holdings."""

    state: State
    place: Place
    rank_bytes: int


@dataclass(frozen=True)
class StageMemory:
    """Model states of one ZeRO stage."""

    stage: int
    ranks_per_node: int
    holdings: tuple[Holding, ...]

    def bytes_at(self, place: Place, state: State | None = None) -> int:
        """Bytes of ``state`` (None: of all states) per GPU; for cpu and nvme, per node with all its ranks."""
        per_rank = sum(
            h.rank_bytes for h in self.holdings if h.place is place and (state is None or h.state is state)
        )
        return per_rank if place is Place.GPU else per_rank * self.ranks_per_node


def model_states(training: Training, stage: int) -> StageMemory:
    """Return what each rank keeps at ZeRO ``stage`` 0 to 3.

    The placement is taken as given: whether DeepSpeed accepts it is decided by
    :func:`peftds_ext.planner.placement.check_stage`.

    Raises:
        ConfigError: ``stage`` is not 0, 1, 2 or 3.
    """
    if stage not in range(4):
        raise ConfigError(f"--stage is {stage}: ZeRO has stages 0, 1, 2 and 3")
    holdings = (*_parameters(training, stage), *_gradients(training, stage), *_optimizer(training, stage))
    return StageMemory(stage, training.ranks_per_node, tuple(h for h in holdings if h.rank_bytes))


def _parameters(training: Training, stage: int) -> Iterator[Holding]:
    """Whole on each rank below stage 3, partitioned at stage 3 (``partition_parameters.py``).

    Two lesser known rules. Stages 1 and 2 with an offloaded optimizer keep, in host memory, a copy of the
    updated partition in the parameters' dtype (``param_buffer_of_bit16_for_cpu_offload_groups``,
    ``stage_1_and_2.py``). With parameters on NVMe, trainable ones are moved back to host memory up to
    ``max_in_cpu`` (``_create_param_groups_fp16_flat_cpu_memory``, ``stage3.py``).
    """
    size, own_trainable = training.dtype.itemsize, training.partition(training.trainable_count)
    if stage < 3:
        yield Holding(State.PARAMETERS, Place.GPU, training.parameters * size)
        if stage > 0 and training.optimizer_offloaded and training.master:
            yield Holding(State.PARAMETERS, Place.CPU, own_trainable * size)
        return
    own = training.partition(training.parameters)
    in_host = min(own_trainable, MAX_IN_CPU) if training.param_device is Place.NVME else 0
    yield Holding(State.PARAMETERS, Place.CPU, in_host * size)
    yield Holding(State.PARAMETERS, training.param_device, (own - in_host) * size)


def _gradients(training: Training, stage: int) -> Iterator[Holding]:
    """Whole on each rank below stage 2, partitioned from stage 2 on.

    On the GPU: stage 1 reduces at the end of backward, so that every gradient is there by then, with an
    offloaded optimizer too (``reduce_gradients``, ``stage_1_and_2.py``). Stage 1 with bf16 parameters and
    fp32 gradients is another class, which keeps both forms (``fp32_groups_gradients_flat`` and ``.grad``,
    ``bf16_optimizer.py``). Stage 2 with 16-bit parameters and fp32 gradients accumulates its partition on
    the GPU before it is offloaded (``_use_compact_grad_partition_buffer``).

    Offloaded: the fp32 gradient of the master (``initialize_optimizer_states`` in both files; with NVMe,
    files written by ``swap_out_gradients``). Stage 3 keeps in host memory, besides, the partition in the
    accumulation dtype (``grad_partitions_flat_buffer``).
    """
    size, trainable = training.accumulation_dtype.itemsize, training.trainable_count
    own = training.partition(trainable)
    upcast = training.accumulation_dtype is DType.FP32 and training.dtype is not DType.FP32
    if stage < 2:
        yield Holding(State.GRADIENTS, Place.GPU, trainable * size)
        if stage == 1 and upcast and training.dtype is DType.BF16 and not training.optimizer_offloaded:
            yield Holding(State.GRADIENTS, Place.GPU, trainable * training.dtype.itemsize)
    elif not training.optimizer_offloaded or (stage == 2 and upcast):
        yield Holding(State.GRADIENTS, Place.GPU, own * size)
    if not training.optimizer_offloaded:
        return
    if training.master:
        yield Holding(State.GRADIENTS, training.optimizer_device, own * FP32_BYTES)
    if stage == 3 or not training.master:
        yield Holding(State.GRADIENTS, Place.CPU, own * size)


def _optimizer(training: Training, stage: int) -> Iterator[Holding]:
    """The master and both Adam moments, in fp32; partitioned from stage 1 on.

    From stage 1 on the master is a copy of its own for fp32 parameters as well: stages 1 and 2 clone
    without a condition, and stage 3 means to share the tensor but compares a ``torch.device`` with a
    string, which is never equal (``_create_fp32_partitions``, ``stage3.py``). Stage 0 has a master for
    16-bit parameters only (``fp16/fused_optimizer.py``).
    """
    trainable = training.trainable_count
    own = trainable if stage == 0 else training.partition(trainable)
    if training.master and (stage > 0 or training.dtype is not DType.FP32):
        yield Holding(State.MASTER, training.optimizer_device, own * FP32_BYTES)
    for moment in (State.EXP_AVG, State.EXP_AVG_SQ):
        yield Holding(moment, training.optimizer_device, own * FP32_BYTES)
