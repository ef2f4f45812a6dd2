# SPDX-License-Identifier: Apache-2.0
"""The guard: refuses a DeepSpeed whose methods are not the ones that the engine was written against.

The engine overrides and calls methods of DeepSpeed that are not public. Their parameter names are kept
here as data, one table per minor version, and are compared with what is installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

from peftds_ext.errors import MissingDependencyError, UnsupportedVersionError

SUPPORTED: Final = ">=0.19.8,<0.20"
"""The DeepSpeed versions that the engine knows, as a PEP 440 specifier."""

_INSTALL: Final = f"pip install 'deepspeed{SUPPORTED}'"
_STAGE3: Final = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_STAGE12: Final = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_INIT: Final = "deepspeed.runtime.zero.partition_parameters:Init"
_SWAPPER: Final = "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper"
_OFFLOAD: Final = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
_CPU_ADAM: Final = "deepspeed.ops.adam.cpu_adam:DeepSpeedCPUAdam"


@dataclass(frozen=True)
class Expected:
    """What a callable of DeepSpeed must accept."""

    names: tuple[str, ...]
    """Parameter names in order; ``*`` and ``**`` mark those that collect the rest."""
    keywords: tuple[str, ...] | None = None
    """None: there must be no other parameter. Else ``names`` come first and these must be among the rest."""

    def fits(self, names: tuple[str, ...]) -> bool:
        """Tell whether a callable with these parameter names is the one expected."""
        if self.keywords is None:
            return names == self.names
        rest = names[len(self.names) :]
        return names[: len(self.names)] == self.names and set(self.keywords) <= set(rest)

    def __str__(self) -> str:
        tail = () if self.keywords is None else ("...", *self.keywords, "...")
        return _text((*self.names, *tail))


def _exactly(*names: str) -> Expected:
    return Expected(names)


_SIGNATURES_0_19: Final[Mapping[str, Expected]] = {
    "deepspeed:initialize": _exactly(
        "args",
        "model",
        "optimizer",
        "model_parameters",
        "training_data",
        "lr_scheduler",
        "distributed_port",
        "mpu",
        "dist_init_required",
        "collate_fn",
        "config",
        "mesh_param",
        "config_params",
    ),
    f"{_STAGE3}.__init__": Expected(("self", "module", "init_optimizer"), keywords=("ds_config",)),
    f"{_STAGE3}.initialize_optimizer_states": _exactly("self"),
    # gradients: reduction, hand-over to the host, accumulation boundary
    f"{_STAGE3}.reduce_independent_p_g_buckets_and_remove_grads": _exactly("self", "param"),
    f"{_STAGE3}.independent_gradient_partition_epilogue": _exactly("self"),
    f"{_STAGE3}.partition_grads": _exactly("self", "params_to_release", "grad_partitions"),
    f"{_STAGE3}.zero_grad": _exactly("self", "set_to_none"),
    f"{_STAGE3}.finalize_gradient_accumulation_boundary": _exactly("self"),
    f"{_STAGE3}._finalize_offload_gradient_accumulation": _exactly("self"),
    f"{_STAGE3}._offload_grad_partition_at_boundary": _exactly(
        "self", "param", "grad_buffer", "offload_fp32_gradients", "offload_fp32_offsets"
    ),
    # the step
    f"{_STAGE3}.step": _exactly("self", "closure"),
    f"{_STAGE3}.has_overflow": _exactly("self", "partition_gradients"),
    f"{_STAGE3}._get_norm_groups": _exactly("self"),
    f"{_STAGE3}.complete_grad_norm_calculation_for_cpu_offload": _exactly("self", "params"),
    f"{_STAGE3}.unscale_and_clip_grads": _exactly("self", "sub_group_id", "total_norm"),
    f"{_STAGE3}._optimizer_step": _exactly("self", "sub_group_id"),
    f"{_STAGE3}._reassign_or_swap_out_partitioned_parameters": _exactly("self", "sub_group_id"),
    f"{_STAGE3}._unflatten_partitioned_parameters": _exactly("self", "sub_group_id"),
    f"{_STAGE3}._swappable_optimizer_subgroup": _exactly("self", "sub_group_id"),
    # optimizer states that are stored elsewhere
    f"{_STAGE3}._configure_tensor_swapping": _exactly("self", "offload_optimizer_config", "aio_config"),
    f"{_STAGE3}._setup_for_real_optimizer": _exactly("self"),
    f"{_STAGE3}._create_fp32_partitions": _exactly("self"),
    f"{_STAGE3}._prepare_sub_group": _exactly("self", "sub_group_id", "timer_names"),
    f"{_STAGE3}._release_sub_group": _exactly("self", "sub_group_id", "timer_names"),
    f"{_STAGE3}._optimizer_states_and_gradient_swap_in": _exactly("self", "sub_group_id", "timer_names"),
    f"{_STAGE3}._optimizer_states_and_gradient_swap_out": _exactly("self", "sub_group_id", "timer_names"),
    f"{_STAGE3}._release_swap_buffers": _exactly("self", "sub_group_id"),
    f"{_STAGE3}._writeback_swap_state": _exactly(
        "self", "sub_group_id", "write_opt_state", "write_gradients"
    ),
    f"{_STAGE3}._get_fp32_opt_state_partition": _exactly(
        "self", "param", "release_swap_buffers", "optim_state_key"
    ),
    f"{_STAGE3}._post_step": _exactly("self", "timer_names"),
    f"{_STAGE3}._rigid_state_dict": _exactly("self"),
    f"{_STAGE3}._load_universal_checkpoint": _exactly(
        "self", "checkpoint_folder", "load_optimizer_states", "load_from_fp32_weights"
    ),
    f"{_STAGE3}.destroy": _exactly("self"),
    f"{_STAGE12}.initialize_optimizer_states": _exactly("self"),
    f"{_STAGE12}.unscale_and_clip_grads": _exactly("self", "grad_groups_flat", "total_norm"),
    f"{_STAGE12}._optimizer_step": _exactly("self", "group_no"),
    f"{_STAGE12}.step": _exactly("self", "closure"),
    f"{_STAGE12}.state_dict": _exactly("self"),
    f"{_STAGE12}.destroy": _exactly("self"),
    f"{_STAGE12}._link_all_hp_params": _exactly("self"),
    f"{_STAGE12}._load_legacy_checkpoint": _exactly(
        "self", "state_dict_list", "load_optimizer_states", "load_from_fp32_weights"
    ),
    f"{_STAGE12}._load_universal_checkpoint": _exactly(
        "self", "checkpoint_folder", "load_optimizer_states", "load_from_fp32_weights"
    ),
    f"{_STAGE12}._restore_from_bit16_weights": _exactly("self"),
    # process groups and partitions
    f"{_STAGE3}._get_sub_group_process_group": _exactly("self", "sub_group_id"),
    f"{_STAGE3}._get_param_partition_rank": _exactly("self", "param"),
    f"{_STAGE3}.get_param_comm_dtype": _exactly("self", "param"),
    # readers and writers of the fp32 gradient
    f"{_STAGE3}.get_param_id": _exactly("self", "param"),
    f"{_STAGE3}.get_fp32_grad_partitions": _exactly("self"),
    f"{_STAGE3}._get_fp32_grad_state_partition": _exactly("self", "param", "release_swap_buffers"),
    f"{_STAGE3}.get_fp32_grad_for_param": _exactly("self", "param"),
    f"{_STAGE3}.set_fp32_grad_for_param": _exactly("self", "value", "param"),
    f"{_STAGE3}.get_local_fp32_grad_for_param": _exactly("self", "param"),
    f"{_STAGE3}.set_local_grad_for_param": _exactly("self", "value", "param"),
    f"{_STAGE3}.update_fp32_grad_for_param_vectorized": _exactly("self", "update_func", "param_list"),
    # parameters on NVMe: who makes the swapper, what is called on it, checkpoints
    f"{_INIT}._validate_remote_device": _exactly("self", "remote_device", "ds_config"),
    f"{_INIT}.__init__": Expected(("self", "module"), keywords=("config_dict_or_path",)),
    f"{_INIT}._convert_to_zero_parameters": _exactly("self", "param_list"),
    f"{_INIT}._convert_to_deepspeed_param": _exactly("self", "param"),
    f"{_INIT}._aligned_size": _exactly("self", "param"),
    f"{_INIT}._partition_world_size": _exactly("self", "param"),
    f"{_INIT}._partition_rank": _exactly("self", "param"),
    f"{_SWAPPER}.__init__": _exactly("self", "ds_config", "model_dtype"),
    f"{_SWAPPER}.swappable_tensor": _exactly("self", "param", "numel"),
    f"{_SWAPPER}.get_buffer": _exactly("self", "param", "numel"),
    f"{_SWAPPER}.swap_out_and_release": _exactly("self", "params", "async_op", "force_buffer_release"),
    f"{_SWAPPER}.swap_in": _exactly("self", "params", "async_op", "swap_in_buffers"),
    f"{_SWAPPER}.synchronize_reads": _exactly("self"),
    f"{_SWAPPER}.synchronize_writes": _exactly("self"),
    f"{_SWAPPER}.remove_partition_and_release_buffers": _exactly("self", "params"),
    f"{_SWAPPER}.available_swap_in_buffers": _exactly("self"),
    f"{_SWAPPER}.swap_into_buffer": _exactly("self", "param", "dest_buffer"),
    f"{_SWAPPER}.reserve_partitioned_swap_space": _exactly("self", "partition_num_elems"),
    f"{_SWAPPER}.swap_out_partitioned_params": _exactly("self", "dst_fp16_params", "src_fp32_params"),
    f"{_STAGE3}.initialize_ds_offload": Expected(
        ("self", "module"), keywords=("ds_config", "max_reuse_distance", "max_live_parameters")
    ),
    f"{_STAGE3}.checkpoint_event_prologue": _exactly("self"),
    f"{_STAGE3}.checkpoint_event_epilogue": _exactly("self"),
    f"{_STAGE3}._rigid_load_state_dict": _exactly("self", "state_dict", "load_optimizer_states"),
    f"{_STAGE3}._restore_from_bit16_weights": _exactly("self"),
    f"{_STAGE3}._swap_in_sub_group_to_flat_buffer": _exactly("self", "flat_buffer", "sub_group_id"),
    # hooks at the borders of layers
    f"{_OFFLOAD}.setup_zero_stage3_hooks": _exactly("self"),
    f"{_OFFLOAD}._register_deepspeed_module": _exactly("self", "module", "count"),
    f"{_OFFLOAD}.get_param_coordinator": _exactly("self"),
    f"{_OFFLOAD}.partition_all_parameters": _exactly("self"),
    f"{_OFFLOAD}.release_backward_leftovers": _exactly("self"),
    f"{_OFFLOAD}.destroy": _exactly("self"),
    # the CPU optimizer that holds parameter groups and state
    f"{_CPU_ADAM}.__init__": _exactly(
        "self",
        "model_params",
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "adamw_mode",
        "fp32_optimizer_states",
    ),
    f"{_CPU_ADAM}.step": _exactly("self", "closure"),
}

SIGNATURES: Final[Mapping[tuple[int, int], Mapping[str, Expected]]] = {(0, 19): _SIGNATURES_0_19}
"""Per minor version: ``module:qualified name`` to what it must accept."""

_ATTRIBUTES: Final = (
    "deepspeed.ops.adam.cpu_adam:CPUAdamBuilder",
    "deepspeed.comm.torch:build_shm_op",
    "deepspeed.runtime.zero.partition_parameters:AsyncPartitionedParameterSwapper",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeRoOffload",
    "deepspeed.runtime.engine:DeepSpeedZeroOptimizer",
    "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK",
    "deepspeed.runtime.zero.partition_parameters:DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR",
    "deepspeed.runtime.engine:DeepSpeedEngine.load_module_state_dict",
)
"""Names that are looked up when they are used, and so can be bound to another object."""

_LATE: Final = ("deepspeed.runtime.engine:DeepSpeedZeroOptimizer_Stage3",)
"""Names that must not be there: DeepSpeed's engine imports the class inside a function. Were it to keep
the class in its module, binding ours to the name in ``stage3`` would have no effect, without any error."""


def check_deepspeed() -> None:
    """Make sure that the installed DeepSpeed is one that the engine can plug into. Imports it.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
        UnsupportedVersionError: its version is outside the supported range, or a signature differs.
    """
    try:
        version = str(importlib.import_module("deepspeed").__version__).strip()
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise MissingDependencyError(f"DeepSpeed is not installed: {_INSTALL}") from error
    table = _table(version)
    if table is None:
        raise UnsupportedVersionError(
            f"DeepSpeed {version} is installed; the engine supports {SUPPORTED}: {_INSTALL}"
        )
    differences = list(_differences(table))
    if differences:
        raise UnsupportedVersionError(
            f"DeepSpeed {version} is installed and in the supported range {SUPPORTED}, but it is not as "
            f"expected: {'; '.join(differences)}. Install an unmodified release ({_INSTALL}) or set "
            f'"enabled" to false in the section "peftds_ext"'
        )


def describe() -> tuple[str | None, bool, str]:
    """Return the installed version or None, whether it is supported, and the reason; never raises."""
    version = _installed_version()
    try:
        check_deepspeed()
    except Exception as error:  # importing DeepSpeed can fail in any way on a machine not set up for it
        return version, False, str(error) or type(error).__name__
    return version, True, f"in the supported range {SUPPORTED}, signatures as expected"


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that a function accepts once decorators are undone, as :class:`Expected` has them.

    DeepSpeed's ``instrument_w_nvtx`` does not set ``__wrapped__``. A function that takes nothing but
    ``*args, **kwargs`` is therefore followed to the one function in its closure.
    """
    while True:
        function = inspect.unwrap(function)
        names = tuple(_name(item) for item in inspect.signature(function).parameters.values())
        inner = _functions_in_closure(function) if names == ("*args", "**kwargs") else []
        if len(inner) != 1:
            return names
        function = inner[0]


def _table(version: str) -> Mapping[str, Expected] | None:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version)
    except InvalidVersion:
        return None
    if not SpecifierSet(SUPPORTED).contains(parsed, prereleases=True):
        return None
    return SIGNATURES.get((parsed.major, parsed.minor))


def _differences(table: Mapping[str, Expected]) -> Iterator[str]:
    for name, expected in table.items():
        function = _resolve(name)
        if not callable(function):
            yield f"{_short(name)} is missing"
            continue
        names = parameter_names(function)
        if not expected.fits(names):
            yield f"{_short(name)} should accept {expected} and accepts {_text(names)}"
    for name in _ATTRIBUTES:
        if _resolve(name) is None:
            yield f"{_short(name)} is missing"
    for name in _LATE:
        if _resolve(name) is not None:
            yield f"{_short(name)} is imported with the module and can no longer be replaced"


def _resolve(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def _functions_in_closure(function: Callable[..., Any]) -> list[FunctionType]:
    if not isinstance(function, FunctionType):
        return []
    captured = inspect.getclosurevars(function).nonlocals.values()
    return [item for item in captured if isinstance(item, FunctionType)]


def _name(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    return stars.get(parameter.kind.name, "") + parameter.name


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None


def _short(name: str) -> str:
    return name.replace(":", ".")


def _text(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"
