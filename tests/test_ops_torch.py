# SPDX-License-Identifier: Apache-2.0
"""The operators as torch sees them: refusals, schemas, fake tensors, compilation, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from peftds_ext import ops

ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "step": 3}

# ---- wrong arguments ----------------------------------------------------------------------------

ARGUMENTS = {
    "adamw_step_": ("param", "grad", "exp_avg", "exp_avg_sq", "out"),
    "squared_norm": ("input",),
    "cast_into": ("input", "out"),
    "accumulate_": ("buffer", "grad"),
}
CALLS: dict[str, Callable[..., Any]] = {
    "adamw_step_": lambda *tensors: ops.adamw_step_(*tensors, **ADAMW),
    "squared_norm": ops.squared_norm,
    "cast_into": ops.cast_into,
    "accumulate_": lambda buffer, grad: ops.accumulate_(buffer, grad, add=True),
}
FAULTS: dict[str, Callable[[], Tensor]] = {
    "strided": lambda: torch.full((40,), 2.0)[::2],
    "transposed": lambda: torch.full((4, 5), 2.0).t(),
    "float64": lambda: torch.full((20,), 2.0, dtype=torch.float64),
    "int32": lambda: torch.full((20,), 2, dtype=torch.int32),
    "larger": lambda: torch.full((21,), 2.0),
    "smaller": lambda: torch.full((19,), 2.0),
    "meta": lambda: torch.full((20,), 2.0, device="meta"),
    "bfloat16": lambda: torch.full((20,), 2.0, dtype=torch.bfloat16),
}
CASES = [
    (op, name, fault)
    for op, names in ARGUMENTS.items()
    for name in names
    for fault in FAULTS
    if not (len(names) == 1 and fault in ("larger", "smaller", "meta"))
    if not (fault == "bfloat16" and name not in ("param", "exp_avg", "exp_avg_sq"))
]


@pytest.mark.parametrize(("op", "name", "fault"), CASES)
def test_a_wrong_argument_is_named_and_nothing_is_changed(op: str, name: str, fault: str) -> None:
    tensors = {n: torch.full((20,), 2.0) for n in ARGUMENTS[op]}
    tensors[name] = FAULTS[fault]()
    copies = {n: t.clone() for n, t in tensors.items()}
    versions = {n: t._version for n, t in tensors.items()}
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        CALLS[op](*tensors.values())
    for n, tensor in tensors.items():
        assert tensor._version == versions[n]
        assert tensor.is_meta or torch.equal(tensor, copies[n]), n


@pytest.mark.parametrize(("op", "name", "fault"), [case for case in CASES if case[2] != "meta"])
def test_fake_tensors_are_refused_as_real_ones_are(op: str, name: str, fault: str) -> None:
    tensors = {n: torch.empty(20, device="meta") for n in ARGUMENTS[op]}
    tensors[name] = FAULTS[fault]().to("meta")
    if fault == "strided":
        tensors[name] = torch.empty(40, device="meta")[::2]
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        CALLS[op](*tensors.values())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int, device: str) -> None:
    tensors = [torch.ones(5, device=device) for _ in range(4)]
    with pytest.raises(RuntimeError, match="step counts from 1"):
        ops.adamw_step_(*tensors, **{**ADAMW, "step": step})
    assert device == "meta" or all(torch.equal(t, torch.ones(5)) for t in tensors)


# ---- torch.library, torch.compile, autograd -----------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def adam_tensors(dtype: torch.dtype, count: int = 100) -> list[Tensor]:
    """Return param, grad, exp_avg, exp_avg_sq, out."""
    param = torch.linspace(-3, 3, count)
    grad = torch.linspace(5, -1, count).to(dtype)
    return [param, grad, torch.zeros(count), torch.zeros(count), torch.zeros(count, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck(dtype: torch.dtype, count: int) -> None:
    library = torch.ops.peftds_ext
    tensors = adam_tensors(dtype, count)
    torch.library.opcheck(library.adamw_step_.default, tuple(tensors), ADAMW)
    torch.library.opcheck(library.adamw_step_.default, tuple(tensors[:4]), ADAMW)
    torch.library.opcheck(library.squared_norm.default, (tensors[1],))
    torch.library.opcheck(library.cast_into.default, (tensors[0], tensors[4]))
    for add in (False, True):
        torch.library.opcheck(library.accumulate_.default, (tensors[0], tensors[1], add))
    torch.library.opcheck(library.cast_into.default, (tensors[1].clone().requires_grad_(), tensors[0]))


def use_all_operators(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Operators between torch's own, so that a lost mutation or a wrong order shows in the result."""
    ops.adamw_step_(param * 1, grad, exp_avg, exp_avg_sq, out, **ADAMW)
    before = param.sum()
    ops.adamw_step_(param, grad, exp_avg, exp_avg_sq, **ADAMW)
    narrow = torch.empty_like(param, dtype=torch.float16)
    ops.cast_into(param, narrow)
    collected = ops.accumulate_(narrow, param + 1, add=True)
    return ops.squared_norm(param) + before + collected, narrow.float() + out


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_function_gives_the_same(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(use_all_operators, backend=backend, dynamic=dynamic, fullgraph=True)
    for n in (100, 33):
        eager_tensors, compiled_tensors = (adam_tensors(torch.bfloat16, n) for _ in range(2))
        expected = use_all_operators(*eager_tensors)
        actual = compiled(*compiled_tensors)
        for a, b in zip([*actual, *compiled_tensors], [*expected, *eager_tensors], strict=True):
            assert torch.equal(a, b)


def test_a_function_of_squared_norm_can_be_exported_with_any_size() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.squared_norm(x).sqrt()

    rows = torch.export.Dim("rows")
    exported = torch.export.export(Norm(), (torch.ones(4, 2),), dynamic_shapes={"x": {0: rows}})
    assert exported.module()(torch.full((9, 2), 2.0)).item() == pytest.approx(72**0.5)


def test_fake_tensors_keep_shape_dtype_and_device() -> None:
    with FakeTensorMode():
        norm, out = use_all_operators(*adam_tensors(torch.bfloat16))
    assert (norm.shape, norm.dtype, norm.device.type) == ((), torch.float64, "cpu")
    assert (out.shape, out.dtype) == ((100,), torch.float32)
    assert ops.squared_norm(torch.ones(3, device="meta")).device.type == "meta"


@pytest.mark.parametrize("changed", ["param", "exp_avg", "exp_avg_sq", "out"])
def test_autograd_notices_what_a_step_changes(changed: str) -> None:
    tensors = dict(zip(ARGUMENTS["adamw_step_"], adam_tensors(torch.float32), strict=True))
    weight = torch.ones(100, requires_grad=True)
    loss = (weight * tensors[changed]).sum()  # backward needs the tensor as it was
    ops.adamw_step_(*tensors.values(), **ADAMW)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("write", [ops.cast_into, lambda read, written: ops.accumulate_(written, read, True)])
def test_autograd_notices_writes_and_allows_reads(write: Callable[[Tensor, Tensor], Any]) -> None:
    weight, source, target = torch.ones(10, requires_grad=True), torch.ones(10), torch.ones(10)
    read, written = (weight * source).sum(), (weight * target).sum()
    ops.squared_norm(source)
    write(source, target)
    ops.adamw_step_(torch.ones(10), source, torch.zeros(10), torch.zeros(10), **ADAMW)
    read.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written.backward()


def test_inference_tensors_are_accepted() -> None:
    with torch.inference_mode():
        source, target = torch.linspace(0, 1, 20), torch.zeros(20, dtype=torch.bfloat16)
        ops.cast_into(source, target)
        tensors = adam_tensors(torch.float32)
        ops.adamw_step_(*tensors, **ADAMW)
    assert torch.equal(target, source.bfloat16())
    assert torch.equal(tensors[4], tensors[0])
    ops.cast_into(source * 2, target)  # an inference tensor outside of inference mode
    assert torch.equal(target, (source * 2).bfloat16())


def test_a_tensor_that_is_negative_by_flag_is_read_as_its_value() -> None:
    negative = torch._neg_view(torch.arange(5.0))
    out = torch.zeros(5)
    ops.cast_into(negative, out)
    assert out.tolist() == [0, -1, -2, -3, -4]
