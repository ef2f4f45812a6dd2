# SPDX-License-Identifier: Apache-2.0
"""The compiled core: instruction sets, threads, and its type stub."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from peftds_ext import _native

ISAS = ("scalar", "avx2", "avx512")
AVAILABLE = _native.core().available_cpu_isas()

# Prints a digest of every result; NaNs are made equal first, since which of two NaN operands
# survives an addition is not specified.
DIGESTS = """
import hashlib, itertools, json, os, torch
from peftds_ext import ops
from peftds_ext._native import core

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
digests = {}

def record(name, *tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        nans = torch.full_like(tensor, float("nan"))
        digest.update(torch.where(tensor.isnan(), nans, tensor).view(torch.uint8).numpy().tobytes())
    digests[name] = digest.hexdigest()

def bits(count, dtype, generator):
    raw = torch.randint(-2**31, 2**31, (count,), generator=generator, dtype=torch.int64)
    return raw.to(torch.int32).view(dtype)[:count].clone()

torch.set_num_threads(int(os.environ["THREADS"]))
for count in (1, 7, 15, 16, 17, 31, 1003, 32768, 100003):
    generator = torch.Generator().manual_seed(count)
    for source, target in itertools.product(DTYPES, DTYPES):
        values, out = bits(count, source, generator), torch.zeros(count, dtype=target)
        ops.cast_into(values, out)
        record(f"cast {source} {target} {count}", out)
        norm = ops.accumulate_(out, torch.nan_to_num(values, 1, 1, 1), add=count % 2 == 0)
        record(f"accumulate {source} {target} {count}", out, norm.view(1))
        record(f"norm {source} {count}", ops.squared_norm(torch.nan_to_num(values, 1, 1, 1)).view(1))
    for grad_dtype, out_dtype, adamw, wild in itertools.product(DTYPES, DTYPES, (False, True), (False, True)):
        param, grad, m, v = torch.randn(4, count, generator=generator)
        if wild:  # subnormals, overflow, infinities and NaNs
            param, grad, m, v = (bits(count, torch.float32, generator) for _ in range(4))
        tensors = [param, grad.to(grad_dtype), m, v.abs(), torch.zeros(count, dtype=out_dtype)]
        for step in (1, 2, 3):
            ops.adamw_step_(*tensors, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1,
                            step=step, grad_scale=0.37, adamw_mode=adamw)
        record(f"adam {grad_dtype} {out_dtype} {adamw} {wild} {count}", *tensors)
print(json.dumps([core().cpu_isa(), digests]))
"""


@pytest.fixture(scope="module")
def scalar_digests() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("threads", ["1", "2", "3"])
@pytest.mark.parametrize("isa", ISAS)
def test_results_depend_neither_on_instruction_set_nor_on_threads(
    isa: str, threads: str, run_python: Callable[..., str], scalar_digests: dict[str, str]
) -> None:
    if isa not in AVAILABLE:
        pytest.skip(f"this CPU lacks {isa}")
    if not scalar_digests:
        scalar_digests.update(json.loads(run_python(DIGESTS, PEFTDS_CPU_ISA="scalar", THREADS="1"))[1])
    used, digests = json.loads(run_python(DIGESTS, PEFTDS_CPU_ISA=isa, THREADS=threads))
    assert used == isa
    assert len(digests) > 300
    different = [name for name, digest in digests.items() if digest != scalar_digests[name]]
    assert not different, f"{len(different)} results differ: {different[:5]}"


def test_the_best_available_instruction_set_is_the_default(run_python: Callable[..., str]) -> None:
    code = "from peftds_ext._native import core; print(core().cpu_isa())"
    assert AVAILABLE[0] == "scalar"
    assert run_python(code).strip() == AVAILABLE[-1]
    assert run_python(code, PEFTDS_CPU_ISA="").strip() == AVAILABLE[-1], "empty means not set"


WRONG_ISA = """
import os, torch
from peftds_ext import ops
from peftds_ext._native import core
from peftds_ext.errors import ConfigError

params = [torch.ones(40) for _ in range(4)]
calls = {
    "op": lambda: ops.squared_norm(params[0]),
    "accumulate": lambda: ops.accumulate_(params[0], params[1], False),
    "cast": lambda: ops.cast_into(params[0], params[1]),
    "step": lambda: ops.adamw_step_(*params, lr=1, beta1=0.9, beta2=0.9, eps=1, weight_decay=0, step=1),
    "core": lambda: core().cpu_isa(),
}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        expected = ConfigError if name == "core" else RuntimeError
        assert isinstance(error, expected), (name, type(error))
        print(error)
    else:
        raise SystemExit(f"{name}: no error")
assert all(torch.equal(p, torch.ones(40)) for p in params), "a refused call changed its arguments"
# The choice is made by the first call that succeeds, and then stays.
del os.environ["PEFTDS_CPU_ISA"]
assert ops.squared_norm(params[0]).item() == 40
chosen = core().cpu_isa()
os.environ["PEFTDS_CPU_ISA"] = "nonsense"
assert core().cpu_isa() == chosen
"""


@pytest.mark.parametrize("value", ["sse9", "AVX2", "avx2 ", "scalar,avx2", "neon"])
def test_an_unknown_instruction_set_is_an_error_at_first_use(
    value: str, run_python: Callable[..., str]
) -> None:
    messages = run_python(WRONG_ISA, PEFTDS_CPU_ISA=value).splitlines()
    assert len(messages) == 5
    for message in messages:
        assert f"PEFTDS_CPU_ISA={value} " in message
        for isa in AVAILABLE:
            assert isa in message
        assert "unset the variable" in message


@pytest.mark.skipif(len(AVAILABLE) == len(ISAS), reason="this CPU has every instruction set that we know")
def test_an_instruction_set_that_the_cpu_lacks_is_an_error(run_python: Callable[..., str]) -> None:
    lacking = next(isa for isa in ISAS if isa not in AVAILABLE)
    for message in run_python(WRONG_ISA, PEFTDS_CPU_ISA=lacking).splitlines():
        assert f"PEFTDS_CPU_ISA={lacking} " in message
        assert "lacks" in message


def test_worker_threads_start_when_first_needed_and_follow_torch(run_python: Callable[..., str]) -> None:
    code = """
import torch
torch.set_num_threads(3)
from peftds_ext import ops
from peftds_ext._native import core
counts = [core().worker_threads()]

def use(count):
    tensors = [torch.ones(count) for _ in range(5)]
    ops.adamw_step_(*tensors, lr=1, beta1=0.9, beta2=0.9, eps=1, weight_decay=0, step=1)
    ops.squared_norm(tensors[0])
    ops.cast_into(tensors[0], tensors[1])
    ops.accumulate_(tensors[0], tensors[1], add=True)
    counts.append(core().worker_threads())

use(1000)       # too small to share
torch.set_num_threads(1)
use(1_000_000)  # alone
torch.set_num_threads(2)
use(1_000_000)
torch.set_num_threads(3)
use(1_000_000)
torch.set_num_threads(2)
use(1_000_000)
print(counts)
"""
    imported, small, alone, two, three, two_again = json.loads(run_python(code))
    assert (imported, small, alone) == (0, 0, 0)
    assert two == 1
    assert three == 2
    assert two_again <= 2


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(_native.__file__).parent / "_core.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert declared == {name for name in vars(_native.core()) if not name.startswith("_")}
