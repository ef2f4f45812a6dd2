# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's CPU collectives, compiled at run time: put off by install(), given to who trains stock."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from ds_models import Mlp
from ds_runner import Runner
from ds_worker import Run


class Op:
    """Stands for the compiled op; no collective is run with it."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, int]] = []

    def initialize(self, world: int, rank: int) -> None:
        self.ranks.append((world, rank))

    def vector_kernel_level(self) -> int:
        return 3


def deferred(run: Run, engines: list[str]) -> dict[str, Any]:
    """Install, initialize an engine for each of "ours" and "stock", and tell when the op was built."""
    import deepspeed

    import peftds_ext

    built: list[Op] = []

    def build() -> Op:
        built.append(Op())
        return built[-1]

    comm_torch = importlib.import_module("deepspeed.comm.torch")
    comm_torch.build_shm_op = build
    peftds_ext.install()
    counts = []
    for kind in engines:
        if kind == "distributed":
            deepspeed.init_distributed()
        elif kind == "uninstall":
            peftds_ext.uninstall()
        else:
            config = run.config() | {"peftds_ext": {"enabled": kind == "ours"}}
            if kind == "ours":
                config["optimizer"]["params"].pop("torch_adam")
            model = Mlp()
            deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
            backend = deepspeed.comm.comm.cdb
            assert backend.shm_comm_op is (built[-1] if built else None)
            assert not built or backend.shm_vector_kernel_level == 3
            backend.shm_comm_op = None  # it can do nothing
        counts.append(len(built))
    restored = comm_torch.build_shm_op is build
    return {"counts": counts, "ranks": [op.ranks for op in built], "restored": restored}


@pytest.mark.parametrize(
    ("engines", "counts"),
    [
        (["ours"], [0]),
        (["distributed", "ours"], [0, 0]),
        (["stock"], [1]),
        (["distributed", "stock"], [0, 1]),
        (["ours", "stock"], [0, 1]),
        (["uninstall", "stock"], [0, 1]),
    ],
)
def test_op_is_built_for_stock_alone(runner: Runner, engines: list[str], counts: list[int]) -> None:
    result = runner.one(deferred, "bare", engines=engines).result
    assert result["counts"] == counts
    assert result["ranks"] == [[(1, 0)]] * counts[-1]
    assert result["restored"] is (engines[0] == "uninstall")
