# SPDX-License-Identifier: Apache-2.0
"""The thread pool across fork() and under calls from many threads.

Every case runs in an interpreter of its own, whose time limit turns a deadlock into a failure. Data is
made and compared by numpy: torch's own parallel loops hang in the child of a process that has used
them, so that none may run here beside ours.
"""

from __future__ import annotations

from collections.abc import Callable

PREPARE = """
import os, sys, threading
import numpy, torch
from peftds_ext import ops
from peftds_ext._native import core

COUNT = 300_000
torch.set_num_threads(1)
START = [numpy.linspace(*ends, COUNT, dtype=numpy.float32) for ends in ((-2, 2), (3, -1))]
START += [numpy.zeros(COUNT, dtype) for dtype in (numpy.float32, numpy.float32, numpy.float16)]

def step():
    arrays = [array.copy() for array in START]
    tensors = [torch.from_numpy(array) for array in arrays]
    for number in range(1, 4):
        ops.adamw_step_(*tensors, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=number)
    return [*arrays, ops.squared_norm(tensors[0]).numpy()]

def same(actual):
    return all(numpy.array_equal(a, e) for a, e in zip(actual, EXPECTED, strict=True))

def in_child(action):
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            status = 0 if action() else 1
        finally:
            os._exit(status)
    return pid

def ended_well(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

EXPECTED = step()
assert core().worker_threads() == 0
torch.set_num_threads(3)
"""


def test_a_child_has_a_pool_of_its_own(run_python: Callable[..., str]) -> None:
    run_python(
        PREPARE
        + """
assert same(step()) and core().worker_threads() == 2

def child():
    fresh = core().worker_threads() == 0
    grandchild = in_child(lambda: same(step()))
    return fresh and same(step()) and core().worker_threads() == 2 and ended_well(grandchild)

assert ended_well(in_child(child))
assert same(step()) and core().worker_threads() == 2
"""
    )


def test_a_child_may_end_as_any_interpreter_does(run_python: Callable[..., str]) -> None:
    run_python(
        PREPARE
        + """
step()
pid = os.fork()
if pid == 0:
    sys.exit(0 if same(step()) else 1)  # runs destructors and exit handlers, unlike os._exit
assert ended_well(pid)
"""
    )


def test_forks_while_other_threads_are_inside_the_kernels(run_python: Callable[..., str]) -> None:
    run_python(
        PREPARE
        + """
stop, wrong = threading.Event(), []

def work():
    while not stop.is_set():
        if not same(step()):
            wrong.append("a result differs")

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    for _ in range(30):
        assert ended_well(in_child(lambda: same(step())))
finally:
    stop.set()
    for thread in threads:
        thread.join()
assert not wrong
"""
    )


def test_many_threads_step_at_once(run_python: Callable[..., str]) -> None:
    run_python(
        PREPARE
        + """
results = []
barrier = threading.Barrier(8)

def work():
    barrier.wait()
    for _ in range(5):
        results.append(same(step()))

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [True] * 40
assert core().worker_threads() <= 2
"""
    )


def test_data_loader_workers_use_the_operators(run_python: Callable[..., str]) -> None:
    run_python(
        PREPARE
        + """
from torch.utils.data import DataLoader, Dataset

class Cast(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        torch.set_num_threads(2)  # a worker starts with one
        out = numpy.zeros(COUNT, numpy.float16)
        ops.cast_into(torch.from_numpy(START[0] + index), torch.from_numpy(out))
        return out, core().worker_threads()

step()
loader = DataLoader(Cast(), batch_size=None, num_workers=2, multiprocessing_context="fork")
for index, (out, workers) in enumerate(loader):
    assert numpy.array_equal(out, (START[0] + numpy.float32(index)).astype(numpy.float16))
    assert workers == 1
    assert same(step())
"""
    )
