# SPDX-License-Identifier: Apache-2.0
"""Layers of models of several families: what is a block, and what is left to single modules."""

from __future__ import annotations

import pytest
from torch import nn

from peftds_ext.stream.layers import find_layers


class Block(nn.Module):
    """A layer with modules inside, as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(2, 4), nn.Linear(4, 2), nn.LayerNorm(2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))


def model(**parts: nn.Module) -> nn.Module:
    whole = nn.Module()
    for name, part in parts.items():
        whole.add_module(name, part)
    return whole


def names(module: nn.Module) -> list[str]:
    return [layer.name for layer in find_layers(module)]


def test_members_of_a_list_are_blocks_and_the_outermost_list_counts() -> None:
    found = find_layers(
        model(embed=nn.Embedding(5, 2), layers=nn.ModuleList([Block(), Block()]), head=nn.Linear(2, 5))
    )
    assert [layer.name for layer in found] == ["embed", "layers.0", "layers.1", "head"]
    assert [len(layer.parameters) for layer in found] == [1, 12, 12, 2]


def test_every_parameter_is_in_a_layer_once() -> None:
    whole = model(a=Block(), layers=nn.ModuleList([Block(), Block(), nn.Identity()]), b=nn.LayerNorm(3))
    whole.register_parameter("loose", nn.Parameter(nn.Linear(1, 1).weight.detach()))
    listed = [parameter for layer in find_layers(whole) for parameter in layer.parameters]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(whole.parameters())


def test_a_tied_parameter_is_in_both_layers_and_once_in_each() -> None:
    whole = model(embed=nn.Embedding(5, 2), layers=nn.ModuleList([Block(), Block()]), head=nn.Linear(2, 5))
    whole.head.weight = whole.embed.weight  # type: ignore[union-attr]
    by_name = {layer.name: layer.parameters for layer in find_layers(whole)}
    assert by_name["embed"][0] is by_name["head"][0]
    shared = Block()
    shared.down.weight = nn.Parameter(shared.up.weight.detach().t())
    shared.norm.bias = shared.norm.weight
    (layer, _) = find_layers(model(layers=nn.ModuleList([shared, Block()])))
    assert len(layer.parameters) == len(set(layer.parameters)) == 11


@pytest.mark.parametrize(
    "part",
    [
        nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),  # of plain modules: nothing is gained by a block
        nn.ModuleList([Block()]),  # one alone
        nn.ModuleDict({"a": nn.Linear(2, 2)}),
    ],
)
def test_what_is_no_stack_is_entered_module_by_module(part: nn.Module) -> None:
    found = find_layers(model(part=part))
    assert all(not any(True for _ in layer.module.children()) or layer.name.count(".") > 1 for layer in found)
    assert {p for layer in found for p in layer.parameters} == set(part.parameters())


def test_models_without_parameters_have_no_layers() -> None:
    assert names(model(a=nn.Identity(), b=nn.ModuleList([nn.ReLU(), nn.ReLU()]))) == []


FAMILIES = {
    "LlamaConfig": ("model.layers.", 2),
    "GPT2Config": ("transformer.h.", 2),
    "T5Config": ("coder.block.", 4),
    "MixtralConfig": ("model.layers.", 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_of_transformers_are_blocks_with_lora_inside(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {
        "LlamaConfig": {**small, "num_key_value_heads": 2},
        "MixtralConfig": {**small, "num_key_value_heads": 2, "num_local_experts": 2},
        "GPT2Config": {"n_embd": 16, "n_layer": 2, "n_head": 2},
        "T5Config": {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2},
    }[family]
    base = transformers.AutoModel.from_config(getattr(transformers, family)(vocab_size=32, **sizes))
    whole = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules="all-linear"))
    inner, count = FAMILIES[family]
    part = inner.removeprefix("model.").removeprefix("transformer.")
    blocks = [layer for layer in find_layers(whole) if f"{part}0" in layer.name or f"{part}1" in layer.name]
    outer = [layer for layer in blocks if layer.name.endswith((f"{part}0", f"{part}1"))]
    assert len(outer) == len(blocks) == count
    assert all(any("lora_A" in name for name, _ in layer.module.named_parameters()) for layer in outer)
