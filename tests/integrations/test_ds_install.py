# SPDX-License-Identifier: Apache-2.0
"""Switching the engine on and off, and what stays stock when it is off."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ds_models import Mlp, rows
from ds_runner import Runner
from ds_worker import Run, no_shared_memory_collectives


def _train(engine: Any, steps: int = 3) -> list[float]:
    losses = []
    for x in rows(steps):
        loss = engine(x.to(engine.get_data_types()[0]))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def _kinds(engine: Any) -> tuple[str, str, str]:
    inner = engine.optimizer.optimizer
    op = type(getattr(inner, "ds_opt_adam", None))
    return type(engine.optimizer).__name__, type(inner).__name__, op.__name__


def _bindings() -> tuple[Any, ...]:
    import importlib

    import deepspeed
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.zero import stage3

    comm = importlib.import_module("deepspeed.comm.torch")
    return (
        deepspeed.initialize,
        cpu_adam.CPUAdamBuilder,
        stage3.DeepSpeedZeroOptimizer_Stage3,
        comm.build_shm_op,
        deepspeed.ops.adam.DeepSpeedCPUAdam,
    )


def install_and_uninstall(run: Run) -> dict[str, bool]:
    import peftds_ext

    stock = _bindings()
    peftds_ext.install()
    first = _bindings()
    peftds_ext.install()
    again = _bindings()
    peftds_ext.uninstall()
    undone = _bindings()
    peftds_ext.uninstall()
    return {
        "changed": first != stock,
        "idempotent": again == first,
        "restored": undone == stock,
        "twice": _bindings() == stock,
    }


def test_install_is_idempotent_and_uninstall_restores(runner: Runner) -> None:
    result = runner.one(install_and_uninstall, "bare").result
    assert result == {"changed": True, "idempotent": True, "restored": True, "twice": True}


def install_in_threads(run: Run) -> tuple[list[str], bool, tuple[str, str, str]]:
    import peftds_ext

    stock = _bindings()
    errors: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        try:
            for _ in range(20):
                peftds_ext.install()
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    config = run.config() | {"peftds_ext": {"enabled": True}}
    config["optimizer"]["params"].pop("torch_adam")
    kinds = _kinds(run.initialize(Mlp(), config))
    peftds_ext.uninstall()
    return errors, _bindings() == stock, kinds


def test_installs_from_threads_are_one(runner: Runner) -> None:
    errors, restored, kinds = runner.one(install_in_threads, "bare").result
    assert errors == []
    assert restored
    assert kinds == ("PeftdsZeroOptimizer_Stage3", "DeepSpeedCPUAdam", "KernelCpuAdam")


def uninstall_while_training(run: Run, stage: int) -> dict[str, Any]:
    import peftds_ext

    config = run.config(stage=stage)
    engine = run.initialize(Mlp(), config)
    losses = _train(engine, 2)
    peftds_ext.uninstall()
    no_shared_memory_collectives()
    losses += _train(engine, 2)
    config["optimizer"]["params"]["torch_adam"] = True
    import deepspeed

    model = Mlp()
    new = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    return {"kinds": _kinds(engine), "losses": losses, "new": _kinds(new), "new losses": _train(new, 2)}


@pytest.mark.parametrize("stage", [2, 3])
def test_engine_outlives_uninstall_and_new_ones_are_stock(runner: Runner, stage: int) -> None:
    result = runner.one(uninstall_while_training, stage=stage).result
    assert result["kinds"][1:] == ("DeepSpeedCPUAdam", "KernelCpuAdam")
    assert "Peftds" not in result["new"][0]
    assert result["new"][1] == "AdamW"
    assert result["losses"][1] < result["losses"][0]
    assert result["losses"][3] < result["losses"][1]
    assert result["new losses"] == pytest.approx(result["losses"][:2], rel=1e-4)


def initialize_once(run: Run, section: dict[str, Any] | None) -> dict[str, Any]:
    import peftds_ext

    no_shared_memory_collectives()
    stock = _bindings()
    config = run.config()
    if section is None or section.get("enabled", True):
        config["optimizer"]["params"].pop("torch_adam")
    if section is not None:
        config["peftds_ext"] = section
    model = Mlp()
    engine = peftds_ext.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    return {"kinds": _kinds(engine), "restored": _bindings() == stock, "losses": _train(engine)}


@pytest.mark.parametrize(
    ("section", "ours"), [(None, True), ({"enabled": True}, True), ({"enabled": False}, False)]
)
def test_own_initialize_needs_no_section(runner: Runner, section: dict[str, Any] | None, ours: bool) -> None:
    result = runner.one(initialize_once, "bare", section=section).result
    assert (result["kinds"][0] == "PeftdsZeroOptimizer_Stage3") is ours
    assert result["restored"]
    assert result["losses"][2] < result["losses"][0]


def off(run: Run, section: dict[str, Any] | None, install: bool) -> dict[str, Any]:
    import deepspeed

    no_shared_memory_collectives()
    if install:
        import peftds_ext

        peftds_ext.install()
    config = run.config() | ({} if section is None else {"peftds_ext": section})
    model = Mlp()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    return {"kinds": _kinds(engine), "losses": _train(engine), "modules": type(engine.optimizer).__module__}


@pytest.mark.parametrize("section", [None, {"enabled": False}, {}], ids=["absent", "false", "empty"])
def test_without_the_switch_all_is_stock(runner: Runner, section: dict[str, Any] | None) -> None:
    installed = runner.one(off, "bare", section=section, install=True).result
    stock = runner.one(off, "bare", section=None, install=False).result
    assert installed == stock
    assert installed["modules"] == "deepspeed.runtime.zero.stage3"


def wrong_section(run: Run, section: Any, key: str | None, own: bool) -> tuple[str, str, bool]:
    import deepspeed
    import torch

    import peftds_ext

    config = run.config() | {"peftds_ext": section}
    if key == "zenflow":
        config["zero_optimization"]["zenflow"] = {"topk_ratio": 0.1}
    if key == "super_offload":
        config["zero_optimization"]["offload_optimizer"]["super_offload"] = True
    model = Mlp()
    initialize = peftds_ext.initialize if own else deepspeed.initialize
    try:
        initialize(model=model, model_parameters=list(model.parameters()), config=config)
    except Exception as error:
        untouched = not torch.distributed.is_initialized() and not hasattr(model.always.weight, "ds_id")
        return type(error).__name__, str(error), untouched
    return "", "", False


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("section", "key", "error", "named"),
    [
        ({"enabled": True, "enabeld": True}, None, "ConfigError", "enabeld"),
        ({"enabled": "auto"}, None, "ConfigError", "auto"),
        ({"enabled": True}, "zenflow", "ConflictError", "zenflow"),
        ({"enabled": True}, "super_offload", "ConflictError", "super_offload"),
    ],
)
def test_wrong_configuration_raises_before_anything_is_built(
    runner: Runner, section: dict[str, Any], key: str | None, error: str, named: str, own: bool
) -> None:
    kind, message, untouched = runner.one(wrong_section, section=section, key=key, own=own).result
    assert kind == error
    assert named in message
    assert untouched


def failed_initialize(run: Run) -> tuple[str, bool]:
    import deepspeed

    import peftds_ext

    peftds_ext.install()
    installed = _bindings()
    config = run.config() | {"train_batch_size": 7, "gradient_accumulation_steps": 3}
    model = Mlp()
    try:
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    except Exception as error:
        return str(error), _bindings() == installed
    return "", False


def test_error_of_deepspeed_leaves_the_bindings_alone(runner: Runner) -> None:
    message, same = runner.one(failed_initialize).result
    assert "train_batch_size" in message
    assert same


def without_optimizer(run: Run) -> tuple[float, str]:
    import deepspeed

    engine = deepspeed.initialize(model=Mlp(), config=run.config(optimizer=None))[0]
    return float(engine(rows(1)[0].bfloat16())), type(engine.optimizer).__name__


def test_model_without_an_optimizer_only_infers(runner: Runner) -> None:
    ours, stock = runner.pair(without_optimizer)
    assert ours.result == stock.result


def configuration_file(run: Run) -> tuple[str, str, str]:
    import argparse
    import json

    import deepspeed

    path = run.tmp / "ds_config.json"
    path.write_text(json.dumps(run.config()))
    model = Mlp()
    arguments = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    return _kinds(deepspeed.initialize(arguments, model, None, list(model.parameters()))[0])


def test_configuration_file_and_positional_arguments(runner: Runner) -> None:
    kinds = runner.one(configuration_file).result
    assert kinds == ("PeftdsZeroOptimizer_Stage3", "DeepSpeedCPUAdam", "KernelCpuAdam")


def conflict(run: Run, install: bool) -> dict[str, Any]:
    import deepspeed

    no_shared_memory_collectives()
    # DeepCompile does nothing until engine.compile() is called, so stock can train here.
    config = run.config() | {"compile": {"deepcompile": True}}
    if install:
        import peftds_ext

        peftds_ext.install()
        config["peftds_ext"] = {"enabled": True, "on_conflict": "stock"}
    model = Mlp()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    return {"kinds": _kinds(engine), "losses": _train(engine)}


def test_conflict_may_mean_stock_with_one_warning(runner: Runner) -> None:
    ours, stock = (runner.one(conflict, "bare", install=install) for install in (True, False))
    assert ours.result == stock.result
    warnings = [text for level, text in ours.log if level == "WARNING"]
    assert len(warnings) == 1
    assert "compile.deepcompile" in warnings[0]
