# SPDX-License-Identifier: Apache-2.0
"""Finds the layers of a model: the blocks at whose borders weights come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class Layer:
    """A module whose parameters are needed together, from the start of its forward to its end."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    """Each once, in the module's order: of the whole block, or the module's own if it is no block."""


def find_layers(model: nn.Module) -> list[Layer]:
    """Cut a model into layers, in the order of its modules.

    A block is a member of a ``ModuleList`` or ``Sequential`` that holds several modules of one class, such
    as the decoder layers of a transformer; the outermost such list counts. Outside of blocks every module
    with parameters of its own is a layer. A parameter that several layers use (tied weights) is in each.
    """
    return list(_layers(model, ""))


def _layers(module: nn.Module, name: str) -> Iterator[Layer]:
    own = tuple(dict.fromkeys(module.parameters(recurse=False)))
    if own:
        yield Layer(name, module, own)
    blocks = _is_stack(module)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        whole = tuple(dict.fromkeys(child.parameters()))
        if blocks and whole:
            yield Layer(path, child, whole)
        else:
            yield from _layers(child, path)


def _is_stack(module: nn.Module) -> bool:
    """Whether a module is a list of blocks: members with parameters and modules inside, most of one class."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    members = [child for child in module.children() if next(child.parameters(), None) is not None]
    classes = Counter(type(child) for child in members if next(child.children(), None) is not None)
    return bool(classes) and classes.most_common(1)[0][1] >= max(2, len(members) // 2)
