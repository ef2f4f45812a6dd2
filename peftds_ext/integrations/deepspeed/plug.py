# SPDX-License-Identifier: Apache-2.0
"""Switches the engine on: wraps ``deepspeed.initialize`` and binds our classes while it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from peftds_ext.config import SECTION, PeftdsConfig
from peftds_ext.integrations.deepspeed import client_optimizer, cpu_adam, shm_comm
from peftds_ext.integrations.deepspeed.conflicts import check_conflicts
from peftds_ext.integrations.deepspeed.offload import (
    offloads_optimizer,
    offloads_optimizer_to_nvme,
    offloads_parameters_to_nvme,
)
from peftds_ext.integrations.deepspeed.section import load_config, read_section
from peftds_ext.integrations.deepspeed.stage3_layers import drop_copies_before_loads
from peftds_ext.integrations.deepspeed.stage3_nvme import note_checkpoints
from peftds_ext.integrations.deepspeed.state_settings import (
    check_optimizer_nvme_path,
    refuse_compact,
    wants_compact,
)
from peftds_ext.integrations.deepspeed.swapper_seam import SwapperSeam, check_nvme_path, check_source
from peftds_ext.integrations.deepspeed.switch import engine_enabled
from peftds_ext.integrations.deepspeed.versions import check_deepspeed

logger = logging.getLogger("peftds_ext")


class _Installation:
    """What install() changed in DeepSpeed, and how to undo it."""

    def __init__(self) -> None:
        import deepspeed
        from deepspeed.ops.adam import cpu_adam as stock_cpu_adam

        self.initialize: Callable[..., Any] = deepspeed.initialize
        self.builder: type = stock_cpu_adam.CPUAdamBuilder
        self.build_shm_op = shm_comm.defer()
        self.swapper_seam = SwapperSeam()
        self.wrapper = _wrap(self)
        self.active = True
        deepspeed.initialize = self.wrapper
        stock_cpu_adam.CPUAdamBuilder = cpu_adam.stand_in_builder(self.builder)

    def undo(self) -> None:
        import deepspeed
        from deepspeed.ops.adam import cpu_adam as stock_cpu_adam

        self.active = False  # also for whoever still holds the wrapper
        if deepspeed.initialize is self.wrapper:
            deepspeed.initialize = self.initialize
        stock_cpu_adam.CPUAdamBuilder = self.builder
        shm_comm.restore(self.build_shm_op)
        self.swapper_seam.undo()

    def initialize_stock(self, *args: Any, **kwargs: Any) -> Any:
        """Give a run without the engine all that DeepSpeed would have given it."""
        shm_comm.build_deferred(self.build_shm_op)
        with shm_comm.restored(self.build_shm_op):
            return self.initialize(*args, **kwargs)


_lock = threading.RLock()
_installation: _Installation | None = None


def install() -> None:
    """Make ``deepspeed.initialize`` use the engine when the configuration asks for it.

    Idempotent. Nothing changes for a configuration whose ``"peftds_ext"`` section is absent or has
    ``"enabled": false``. Call it before ``deepspeed.initialize``, Trainer or Accelerate, and before
    ``from deepspeed import initialize`` binds the stock function.

    Raises:
        UnsupportedVersionError: this DeepSpeed is not one that the engine knows.
        NativeLoadError: the compiled core is missing.
        ConfigError: ``PEFTDS_CPU_ISA`` names what this CPU lacks.
    """
    global _installation
    with _lock:
        if _installation is not None:
            return
        from peftds_ext import _native

        _native.core().cpu_isa()
        check_deepspeed()
        _installation = _Installation()


def uninstall() -> None:
    """Undo :func:`install`. Engines that exist keep working; new ones are stock. Idempotent."""
    global _installation
    with _lock:
        if _installation is not None:
            _installation.undo()
            _installation = None


def initialize(*args: Any, **kwargs: Any) -> Any:
    """Call ``deepspeed.initialize`` with the engine on, for this call only.

    Same arguments and return value. A missing ``"peftds_ext"`` section means enabled; one that says
    ``"enabled": false`` is honoured. What :func:`install` did before stays as it was.

    Raises:
        ConfigError: the section is not valid.
        ConflictError: another DeepSpeed feature excludes the engine.
        UnsupportedVersionError: this DeepSpeed is not one that the engine knows.
    """
    with _lock:
        installed_before = _installation is not None
        install()
        assert _installation is not None
        current = _installation
    try:
        return _initialize(current, args, kwargs, default=PeftdsConfig(enabled=True))
    finally:
        if not installed_before:
            uninstall()


def _wrap(installation: _Installation) -> Callable[..., Any]:
    stock = installation.initialize

    @functools.wraps(stock)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if not installation.active:
            return stock(*args, **kwargs)
        return _initialize(installation, args, kwargs, default=PeftdsConfig())

    return initialize


def _initialize(
    installation: _Installation, args: tuple[Any, ...], kwargs: dict[str, Any], default: PeftdsConfig
) -> Any:
    bound = inspect.signature(installation.initialize).bind_partial(*args, **kwargs)
    given = bound.arguments
    raw = load_config(given.get("args"), given.get("config"), given.get("config_params"))
    if raw is None:  # DeepSpeed says what is wrong
        return installation.initialize(*args, **kwargs)
    section = read_section(raw) if SECTION in raw else default
    if not section.enabled or not check_conflicts(raw, section):
        return installation.initialize_stock(*args, **kwargs)

    check_nvme_path(raw)
    check_optimizer_nvme_path(raw)
    if not offloads_optimizer(raw):
        refuse_compact(section.optimizer, "the optimizer is not offloaded")
    check_source(raw, given.get("model"))
    with engine_enabled(), _optimizers_bound(raw):
        client = given.get("optimizer")
        if client is not None:
            bound.arguments["optimizer"] = _take_over(client, raw, installation.builder)
        result = installation.initialize(*bound.args, **bound.kwargs)
    _tell(result[0], raw)
    return result


def _tell(engine: Any, raw: Mapping[str, Any]) -> None:
    """Say in the log what the engine has taken over, and what it could not."""
    parts = ["optimizer offloaded"] if offloads_optimizer(raw) else []
    if offloads_parameters_to_nvme(raw):
        swappers = {type(getattr(p, "nvme_swapper", None)).__name__ for p in engine.module.parameters()}
        if swappers - {"ParameterSwapper", "NoneType"}:
            logger.warning(
                "parameters stay with DeepSpeed's own NVMe swapper, since the model was made under zero.Init "
                "before peftds_ext.install(): call that first"
            )
        else:
            parts.append("parameters on NVMe")
    if hasattr(engine.optimizer, "_peftds_loading"):
        note_checkpoints(engine)
        drop_copies_before_loads(engine)
    if read_section(raw).trace is not None and not hasattr(engine.optimizer, "parameter_offload"):
        logger.warning("peftds_ext.trace: nothing is traced, since parameters are not offloaded under ZeRO-3")
    if parts:
        logger.info("engine on: ZeRO stage %s, %s", engine.zero_optimization_stage(), ", ".join(parts))
    else:
        logger.warning(
            "the engine is enabled but has nothing to do: the optimizer is not offloaded, and no parameters "
            "are on NVMe"
        )


def _take_over(client: Any, raw: Mapping[str, Any], builder: type) -> Any:
    """Return what to hand to DeepSpeed for a client's optimizer, or for a function that makes one."""
    if not hasattr(client, "param_groups") and callable(client):
        return lambda parameters: _take_over(client(parameters), raw, builder)
    adapted = client_optimizer.adapt(client, raw)
    cpu_adam.use_kernel(adapted, builder)
    return adapted


@contextlib.contextmanager
def _optimizers_bound(raw: Mapping[str, Any]) -> Iterator[None]:
    """Let DeepSpeed's engine, which looks the ZeRO optimizers' classes up by name, find ours."""
    # SuperOffload's class must derive from the stock class, so it is imported before ours is bound.
    importlib.import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import stage3

    from peftds_ext.integrations.deepspeed import stage3 as ours3
    from peftds_ext.integrations.deepspeed import stage12_states as ours12

    with _lock:
        stock3, stock12 = stage3.DeepSpeedZeroOptimizer_Stage3, engine.DeepSpeedZeroOptimizer
        stage3.DeepSpeedZeroOptimizer_Stage3 = ours3.engine_class(stock3)
        if offloads_optimizer_to_nvme(raw) or wants_compact(read_section(raw).optimizer):
            engine.DeepSpeedZeroOptimizer = ours12.engine_class(stock12, raw)
        try:
            yield
        finally:
            stage3.DeepSpeedZeroOptimizer_Stage3 = stock3
            engine.DeepSpeedZeroOptimizer = stock12
