# SPDX-License-Identifier: Apache-2.0
"""Puts off DeepSpeed's shared-memory collectives, an op that its CPU accelerator compiles at run time.

DeepSpeed builds it when the process group is set up, before any configuration is known. With
:func:`defer` in force the process group starts without it, which means plain gloo, and
:func:`build_deferred` adds it when a run turns out to be stock.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any


def _comm_torch() -> Any:
    # `from deepspeed.comm import torch` would give the package torch, which that module imports.
    return importlib.import_module("deepspeed.comm.torch")


def defer() -> Callable[[], Any]:
    """Let process groups start without the op; return DeepSpeed's function that builds it."""
    comm_torch = _comm_torch()
    stock: Callable[[], Any] = comm_torch.build_shm_op
    comm_torch.build_shm_op = lambda: None
    return stock


def restore(stock: Callable[[], Any]) -> None:
    """Undo :func:`defer`."""
    comm_torch = _comm_torch()
    comm_torch.build_shm_op = stock


@contextlib.contextmanager
def restored(stock: Callable[[], Any]) -> Iterator[None]:
    """Inside this, a process group that is set up gets the op at once, as without :func:`defer`."""
    comm_torch = _comm_torch()
    deferring = comm_torch.build_shm_op
    comm_torch.build_shm_op = stock
    try:
        yield
    finally:
        comm_torch.build_shm_op = deferring


def build_deferred(stock: Callable[[], Any]) -> None:
    """Give the running process group what DeepSpeed would have given it at its start.

    Follows ``TorchBackend.__init__`` in deepspeed/comm/torch.py.
    """
    from deepspeed.comm import comm

    backend = comm.cdb
    if backend is None or getattr(backend, "shm_comm_op", None) is not None:
        return
    op = stock()
    if op is not None:
        op.initialize(backend.get_world_size(), backend.get_rank())
        if hasattr(op, "vector_kernel_level"):
            backend.shm_vector_kernel_level = op.vector_kernel_level()
        backend.shm_comm_op = op
