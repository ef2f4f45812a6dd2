# SPDX-License-Identifier: Apache-2.0
"""A machine without a compiler trains, and DeepSpeed compiles nothing; also in a fresh process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_ds_trainer
from ds_models import Mlp, llama, lora, rows, tokens, train_tokens
from ds_runner import Runner, ScenarioFailed
from ds_worker import Run


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(scope="module")
def bare_machine(
    runner: Runner, extensions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    """A server that never saw a compiler, so that nothing found at import helps."""
    path = tmp_path_factory.mktemp("bin")
    bare = Runner(
        tmp_path_factory.mktemp("bare"), env={"PATH": str(path), "TORCH_EXTENSIONS_DIR": str(extensions)}
    )
    yield bare
    bare.close()


def train(run: Run, stage: int) -> dict[str, Any]:
    for tool in ("g++", "gcc", "c++", "cc", "clang", "ninja"):
        if shutil.which(tool):
            raise AssertionError(f"{tool} is in PATH")
    engine = run.initialize(lora(llama()), run.config(stage=stage))
    return train_tokens(engine, tokens(3))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_needs_no_compiler(bare_machine: Runner, extensions: Path, stage: int) -> None:
    result = bare_machine.one(train, stage=stage).result
    assert len(result["losses"]) == 3
    assert result["norms"][0] > 0.0
    assert list(extensions.iterdir()) == []


def test_trainer_needs_no_compiler(bare_machine: Runner, extensions: Path, tmp_path: Path) -> None:
    result = bare_machine.one(test_ds_trainer.train, optimizer=False, folder=str(tmp_path)).result
    assert result["kinds"][2] == "KernelCpuAdam"
    assert list(extensions.iterdir()) == []


def stock(run: Run) -> None:
    model = Mlp()
    engine = run.initialize(model, run.config())
    engine.backward(engine(rows(1)[0].bfloat16()))
    engine.step()


def test_stock_does_need_one(bare_machine: Runner, tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    env = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    with pytest.raises(ScenarioFailed, match="cpu_adam op, which failed to build"):
        bare_machine.one(stock, "stock", adam="cpu_adam", env=env)
