# SPDX-License-Identifier: Apache-2.0
"""Linear modules that hold no weight from forward to backward give torch's own results."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from streamed_models import identical
from torch import Tensor, nn

from peftds_ext.stream.linear import hold_no_weights, restore

INPUTS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(24),
    "matrix": lambda: torch.randn(7, 24),
    "batch": lambda: torch.randn(2, 5, 24),
    "batches": lambda: torch.randn(2, 3, 5, 24),
    "none": lambda: torch.randn(0, 24),
    "one row": lambda: torch.randn(1, 24),
    "column-major": lambda: torch.randn(24, 7).t(),
    "transposed batch": lambda: torch.randn(5, 2, 24).transpose(0, 1),
    "expanded": lambda: torch.randn(1, 24).expand(6, 24),
}


def linear(bias: str, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(3)
    module = nn.Linear(24, 40, bias=bias != "none", dtype=dtype)
    module.weight.requires_grad_(False)
    if bias == "frozen":
        module.bias.requires_grad_(False)
    return module


def results(module: nn.Linear, inputs: Tensor, between: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Return the output and every gradient; ``between`` is called before the backward pass."""
    inputs = inputs.detach().requires_grad_()
    output = module(inputs)
    between()
    generator = torch.Generator().manual_seed(1)
    output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    gradients = [tensor.grad for tensor in (inputs, *module.parameters())]
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("bias", ["none", "frozen", "trainable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_torch(shape: str, bias: str, dtype: torch.dtype) -> None:
    inputs = INPUTS[shape]().to(dtype)
    expected = results(linear(bias, dtype), inputs)
    assert len(expected) == 2 + (bias == "trainable")
    module = linear(bias, dtype)
    hold_no_weights([module])
    elsewhere, freed = module.weight.data.clone(), []

    def move() -> None:
        module.weight.data.fill_(float("nan"))  # whatever is held of it is of no use
        module.weight.data = torch.empty(0, dtype=dtype)
        module.weight.data = elsewhere
        freed.append(True)

    assert identical(results(module, inputs, move), expected)
    assert freed


def test_a_weight_that_is_gone_in_the_backward_pass_is_an_error() -> None:
    module = linear("frozen", torch.float32)
    hold_no_weights([module])

    def empty() -> None:
        module.weight.data = torch.empty(0)

    with pytest.raises(RuntimeError, match="out of bounds"):
        results(module, torch.randn(3, 24), empty)


def test_a_trainable_weight_has_its_gradient() -> None:
    inputs = torch.randn(3, 24)
    module = linear("trainable", torch.float32)
    hold_no_weights([module])
    module.weight.requires_grad_()
    expected = linear("trainable", torch.float32)
    expected.weight.requires_grad_()
    assert identical(results(module, inputs), results(expected, inputs))
    assert module.weight.grad is not None


def test_autocast_converts_the_weight_as_ever() -> None:
    inputs, changed = torch.randn(3, 24), linear("frozen", torch.float32)
    hold_no_weights([changed])
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(linear("frozen", torch.float32), inputs)
        assert expected[0].dtype is torch.bfloat16
        assert identical(results(changed, inputs), expected)


def test_only_plain_linear_modules_are_changed_and_changed_back() -> None:
    class Other(nn.Linear):
        pass

    own = nn.Linear(2, 2)
    own.forward = lambda input: input  # type: ignore[method-assign]
    plain, later = nn.Linear(2, 2), nn.Linear(2, 2)
    changed = hold_no_weights([own, Other(2, 2), plain, nn.LayerNorm(2), later, plain])
    assert changed == [plain, later]
    copied = copy.deepcopy(plain)
    assert copied.forward.__self__ is copied
    theirs = later.forward = lambda input: input  # type: ignore[method-assign]
    restore(changed)
    assert "forward" not in vars(plain)
    assert vars(later)["forward"] is theirs
