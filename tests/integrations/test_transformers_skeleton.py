# SPDX-License-Identifier: Apache-2.0
"""A skeleton, filled in from the files, is what ``from_pretrained`` loads: that is the oracle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peftds_ext.errors import ConfigError, CorruptDataError, MissingDependencyError
from peftds_ext.store.checkpoint import CheckpointTensor, read_checkpoint, read_tensor

transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402

from peftds_ext.integrations import transformers as subject  # noqa: E402
from peftds_ext.integrations.transformers import Skeleton, load_skeleton  # noqa: E402

CAUSAL = transformers.AutoModelForCausalLM
SEQ2SEQ = transformers.AutoModelForSeq2SeqLM
WHOLE = 1
"""With this threshold every parameter that can stay in the file does."""

DECODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "bos_token_id", "eos_token_id")
}


def llama(**kwargs: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **kwargs))


def bert(kind: str) -> Any:
    return getattr(transformers, kind)(transformers.BertConfig(**ENCODER))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4))


def qwen2_moe() -> Any:
    config = transformers.Qwen2MoeConfig(
        **DECODER, moe_intermediate_size=8, shared_expert_intermediate_size=16, num_experts=4
    )
    return transformers.Qwen2MoeForCausalLM(config)


def gpt2(**kwargs: Any) -> Any:
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=64,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        **kwargs,
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=64)
    return transformers.T5ForConditionalGeneration(config)


def resnet() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config)


def saved(model: Any, folder: Path, **kwargs: Any) -> Path:
    """Save the model with values that no initialisation gives, so that none passes for a loaded one."""
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape) * 0.1)
    model.save_pretrained(folder, **kwargs)
    return folder


def load(auto_class: Any, folder: Path, in_place_bytes: int = WHOLE, **kwargs: Any) -> Skeleton:
    return load_skeleton(auto_class, folder, read_checkpoint(folder), in_place_bytes=in_place_bytes, **kwargs)


def check(skeleton: Skeleton, reference: Any, fresh: frozenset[str] = frozenset()) -> None:
    """Compare bit for bit; the values of the parameters in ``fresh`` were drawn anew by either."""
    model = skeleton.model
    assert type(model) is type(reference)
    assert ties(model) == ties(reference)
    assert model.all_tied_weights_keys == reference.all_tied_weights_keys
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    assert not skeleton.in_place.keys() & skeleton.copied.keys()
    for name, parameter in ours.items():
        assert type(parameter) is torch.nn.Parameter
        assert parameter.requires_grad == theirs[name].requires_grad
        assert is_marked(parameter) == is_marked(theirs[name])
        value = filled_in(skeleton.in_place.get(name), parameter)
        assert not value.isnan().any(), name
        if name in fresh:
            assert (value.shape, value.dtype) == (theirs[name].shape, theirs[name].dtype)
            assert "newly initialised" in skeleton.copied[name]
        else:
            torch.testing.assert_close(value, theirs[name].detach(), rtol=0, atol=0, msg=name)
    ours, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
    assert list(ours) == list(theirs)
    for name, buffer in ours.items():
        assert type(buffer) is torch.Tensor
        assert is_marked(buffer) == is_marked(theirs[name])
        torch.testing.assert_close(buffer, theirs[name], rtol=0, atol=0, equal_nan=False, msg=name)


def is_marked(tensor: torch.Tensor) -> bool:
    """Tell whether Transformers takes the tensor for loaded, and will not initialise it again."""
    return getattr(tensor, "_is_hf_initialized", False)


def ties(model: Any) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def filled_in(tensor: CheckpointTensor | None, parameter: torch.Tensor) -> torch.Tensor:
    if tensor is None:
        return parameter.detach()
    assert tensor.shape == parameter.shape
    assert parameter.untyped_storage().nbytes() == parameter.dtype.itemsize
    assert parameter.isnan().all()
    return read_tensor(tensor).to(parameter.dtype)


@pytest.mark.parametrize("dtype", [None, "auto", "bfloat16", torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_decoder_with_every_dtype(tmp_path: Path, dtype: Any, stored: torch.dtype) -> None:
    kwargs = {} if dtype is None else {"dtype": dtype}
    folder = saved(llama().to(stored), tmp_path)
    skeleton = load(CAUSAL, folder, **kwargs)
    check(skeleton, CAUSAL.from_pretrained(folder, **kwargs))
    assert skeleton.in_place.keys() == dict(skeleton.model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("auto_class", "make", "kwargs"),
    [
        (transformers.LlamaForCausalLM, llama, {}),
        (CAUSAL, lambda: llama(tie_word_embeddings=True), {}),
        (transformers.AutoModelForMaskedLM, lambda: bert("BertForMaskedLM"), {}),
        (CAUSAL, gpt2, {"dtype": torch.bfloat16}),
        (transformers.AutoModel, gpt2, {}),
        (CAUSAL, lambda: gpt2(tie_word_embeddings=False), {}),
        (SEQ2SEQ, t5, {"dtype": torch.float16}),
        (transformers.AutoModelForImageClassification, resnet, {"dtype": torch.bfloat16}),
    ],
    ids=["class", "tied", "masked", "gpt2", "gpt2-base", "gpt2-untied", "t5-keeps-fp32", "resnet-buffers"],
)
def test_equals_a_load(
    tmp_path: Path, auto_class: Any, make: Callable[[], Any], kwargs: dict[str, Any]
) -> None:
    folder = saved(make(), tmp_path)
    skeleton = load(auto_class, folder, **kwargs)
    check(skeleton, auto_class.from_pretrained(folder, **kwargs))
    assert len(skeleton.in_place) > 0.9 * len(list(skeleton.model.parameters()))


@pytest.mark.parametrize("make", [mixtral, qwen2_moe])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_experts_are_copied(tmp_path: Path, make: Callable[[], Any], dtype: torch.dtype) -> None:
    folder = saved(make(), tmp_path)
    assert any(".experts.3." in name for name in read_checkpoint(folder)), "not in the layout of the hub"
    skeleton = load(CAUSAL, folder, dtype=dtype)
    check(skeleton, CAUSAL.from_pretrained(folder, dtype=dtype))
    experts = {name for name, _ in skeleton.model.named_parameters() if ".experts." in name}
    assert len(experts) == 4
    assert skeleton.copied.keys() == experts
    assert all("made by transformers" in reason for reason in skeleton.copied.values())


def test_prefix_is_dropped_and_added(tmp_path: Path) -> None:
    folder = saved(bert("BertForMaskedLM"), tmp_path / "masked")
    pooler = frozenset({"pooler.dense.weight", "pooler.dense.bias"})
    skeleton = load(transformers.AutoModel, folder)
    check(skeleton, transformers.AutoModel.from_pretrained(folder), pooler)
    assert skeleton.copied.keys() == pooler
    word = skeleton.in_place["embeddings.word_embeddings.weight"]
    assert word.name == "bert.embeddings.word_embeddings.weight"

    folder = saved(bert("BertModel"), tmp_path / "base")
    classifier = transformers.AutoModelForSequenceClassification
    head = frozenset({"classifier.weight", "classifier.bias"})
    skeleton = load(classifier, folder, num_labels=3)
    check(skeleton, classifier.from_pretrained(folder, num_labels=3), head)
    assert skeleton.copied.keys() == head
    assert skeleton.model.classifier.weight.shape == (3, 16)
    assert skeleton.model.classifier.weight.std() > 0


def test_head_of_another_size_is_initialised(tmp_path: Path) -> None:
    classifier = transformers.AutoModelForSequenceClassification
    folder = saved(bert("BertForSequenceClassification"), tmp_path)
    kwargs: dict[str, Any] = {"num_labels": 5, "ignore_mismatched_sizes": True}
    skeleton = load(classifier, folder, **kwargs)
    head = frozenset({"classifier.weight", "classifier.bias"})
    check(skeleton, classifier.from_pretrained(folder, **kwargs), head)
    assert {skeleton.copied[name].partition(":")[0] for name in head} == {
        "of another shape in the checkpoint"
    }
    with pytest.raises(RuntimeError):
        load(classifier, folder, num_labels=5)


def test_shards(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path, max_shard_size="8KB")
    skeleton = load(CAUSAL, folder)
    assert len({tensor.file.path for tensor in skeleton.in_place.values()}) > 2
    check(skeleton, CAUSAL.from_pretrained(folder))


def test_without_a_dtype_in_the_configuration_the_first_tensor_counts(tmp_path: Path) -> None:
    model = llama()
    model.model.norm.to(torch.bfloat16)
    folder = saved(model, tmp_path)
    config = transformers.LlamaConfig(**DECODER)
    assert config.dtype is None
    skeleton = load(CAUSAL, folder, config=config)
    check(skeleton, CAUSAL.from_pretrained(folder, config=config))


@pytest.mark.parametrize("names", ["both", "other", "different"])
def test_ties_follow_the_bytes_of_the_file(tmp_path: Path, monkeypatch: Any, names: str) -> None:
    model = llama(tie_word_embeddings=True)
    folder = saved(model, tmp_path)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if names == "other":
        del state["model.embed_tokens.weight"]
    if names == "different":
        state["lm_head.weight"][-1, -1] += 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(subject, "_COMPARED_BYTES", 100)
    skeleton = load(CAUSAL, folder)
    check(skeleton, CAUSAL.from_pretrained(folder))
    assert (len(ties(skeleton.model)) == len(state)) == (names != "both")


def test_threshold_counts_the_bytes_in_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    folder = saved(llama(), tmp_path)
    read: list[int] = []

    def reads(tensor: CheckpointTensor) -> torch.Tensor:
        read.append(tensor.nbytes)
        return read_tensor(tensor)

    monkeypatch.setattr(subject, "read_tensor", reads)
    skeleton = load(CAUSAL, folder, in_place_bytes=16 * 16 * 4, dtype=torch.bfloat16)
    monkeypatch.undo()
    check(skeleton, CAUSAL.from_pretrained(folder, dtype=torch.bfloat16))
    assert {tensor.nbytes for tensor in skeleton.in_place.values()} == {1024, 2048, 4096}
    assert skeleton.copied == {}
    assert sorted(read) == [64] * 5 + [512] * 4, "more was read than stays in memory"


class Rewriting(transformers.LlamaForCausalLM):
    """Gives weights other values after they were loaded, in ways that leave the parameter what it was."""

    def tie_weights(self, **kwargs: Any) -> None:
        super().tie_weights(**kwargs)
        layers = self.model.layers
        if layers[0].mlp.up_proj.weight.device.type != "meta":
            layers[0].mlp.up_proj.weight.data[3].zero_()
            layers[0].input_layernorm.weight.data = layers[1].input_layernorm.weight.data
            layers[1].mlp.up_proj.weight.data = torch.zeros(32, 16)
            with torch.no_grad():
                layers[1].mlp.gate_proj.weight.mul_(2)


def test_what_is_rewritten_after_the_load_is_copied(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)
    skeleton = load(Rewriting, folder)
    check(skeleton, Rewriting.from_pretrained(folder))
    assert skeleton.copied.keys() == {
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
    }


class Sharing(transformers.LlamaForCausalLM):
    """Has a parameter that is in no checkpoint, and lets it have the memory of one that is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = torch.nn.Parameter(torch.zeros(16))

    def tie_weights(self, **kwargs: Any) -> None:
        super().tie_weights(**kwargs)
        if "extra" in self._parameters and self.extra.device.type != "meta":
            self.extra.data = self.model.norm.weight.detach()


def test_memory_taken_from_a_weight_is_refused(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)
    with pytest.raises(ConfigError, match="Sharing gives extra the memory"):
        load(Sharing, folder)


def test_values_that_are_nan_in_the_file_are_kept(tmp_path: Path) -> None:
    model = mixtral()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
        model.model.layers[0].mlp.experts.down_proj[1, 2, 3] = float("nan")
    model.save_pretrained(tmp_path)
    skeleton = load(CAUSAL, tmp_path)
    assert "model.norm.weight" in skeleton.in_place
    assert skeleton.model.model.layers[0].mlp.experts.down_proj.isnan().sum() == 1


def test_integers_and_float8_become_floats_in_memory(tmp_path: Path) -> None:
    model = llama()
    folder = saved(model, tmp_path)
    state = dict(model.state_dict())
    state["model.norm.weight"] = torch.arange(16)
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    skeleton = load(CAUSAL, folder)
    check(skeleton, CAUSAL.from_pretrained(folder))
    assert skeleton.copied.keys() == {"model.norm.weight", "lm_head.weight"}


def test_what_belongs_to_the_folder_is_set(tmp_path: Path) -> None:
    model = llama()
    model.generation_config.max_new_tokens = 7
    folder = saved(model, tmp_path)
    for name in ("generation_config.json", None):
        skeleton, reference = load(CAUSAL, folder), CAUSAL.from_pretrained(folder)
        assert skeleton.model.config.to_dict() == reference.config.to_dict()
        assert skeleton.model.generation_config.to_dict() == reference.generation_config.to_dict()
        assert skeleton.model.name_or_path == reference.name_or_path == str(folder)
        assert skeleton.model.config.name_or_path == reference.config.name_or_path
        assert vars(skeleton.model).keys() == vars(reference).keys()
        assert not skeleton.model.training
        if name:
            assert skeleton.model.generation_config.max_new_tokens == 7
            (folder / name).unlink()


def test_filled_in_model_computes_and_saves_the_same(tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path / "a")
    skeleton, reference = load(CAUSAL, folder), CAUSAL.from_pretrained(folder)
    for name, parameter in skeleton.model.named_parameters():
        if name in skeleton.in_place:
            parameter.data = read_tensor(skeleton.in_place[name])
    tokens = torch.arange(8).reshape(1, 8)
    torch.testing.assert_close(skeleton.model(tokens).logits, reference(tokens).logits, rtol=0, atol=0)
    skeleton.model.save_pretrained(tmp_path / "b")
    assert (tmp_path / "b/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_file_that_changed_meanwhile(tmp_path: Path) -> None:
    folder = saved(mixtral(), tmp_path)
    checkpoint = read_checkpoint(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(CorruptDataError, match=r"model\.safetensors"):
        load_skeleton(CAUSAL, folder, checkpoint, in_place_bytes=WHOLE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state_dict", {}),
        ("device_map", "auto"),
        ("quantization_config", {"load_in_4bit": True}),
        ("low_cpu_mem_usage", True),
        ("tp_plan", "auto"),
        ("gguf_file", "model.gguf"),
        ("adapter_kwargs", {}),
        ("subfolder", "text"),
        ("use_safetensors", False),
    ],
)
def test_arguments_that_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\b{name}\b"):
        load_skeleton(CAUSAL, tmp_path, {}, **{name: value})


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        load_skeleton(CAUSAL, tmp_path / "none", {})
    folder = saved(llama(), tmp_path / "model")
    with pytest.raises(ConfigError, match="config is a str"):
        load(CAUSAL, folder, config="other")
    config = transformers.LlamaConfig(**DECODER, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantization_config"):
        load(CAUSAL, folder, config=config)
    config = transformers.LlamaConfig(**DECODER, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(ConfigError, match="auto_map"):
        load(CAUSAL, folder, config=config, trust_remote_code=True)
    config = transformers.LlamaConfig(**DECODER, transformers_weights="other.safetensors")
    with pytest.raises(ConfigError, match=r"other\.safetensors"):
        load(CAUSAL, folder, config=config)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        load(CAUSAL, folder)


def test_default_device_is_refused(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path)
    with torch.device("meta"), pytest.raises(ConfigError, match="default device is meta"):
        load(CAUSAL, folder)


def test_transformers_does_not_partition_what_it_loads_here(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    folder = saved(llama(), tmp_path)
    alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert load(CAUSAL, folder).in_place
    assert is_deepspeed_zero3_enabled()  # for what comes after
    del alive


def test_without_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        load_skeleton(CAUSAL, tmp_path, {})
