# SPDX-License-Identifier: Apache-2.0
"""The script for weights on NVMe: options, data and report, and the same losses as from memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("deepspeed")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import demo_report
import lora_nvme
import swap_folder
import words_data
from topics_data import python_help_topics

SHAPE = ["--layers", "2", "--vocabulary", "2048", "--tokens", "48", "--steps", "10"]
NVME = ["--nvme-path", "folder"]

# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--nvme-path PATH is missing"),
        (["--offload", "cpu", *NVME], "--nvme-path goes with --offload nvme"),
        (["--offload", "cpu", "--max-in-cpu", "0"], "--max-in-cpu goes with --offload nvme"),
        ([*NVME, "--hidden", "100"], "not a multiple of 64"),
        ([*NVME, "--hidden", "0"], "not a positive number"),
        ([*NVME, "--tokens", "1"], "no next token"),
        ([*NVME, "--max-in-cpu", "-1"], "is negative"),
    ],
)
def test_bad_options_are_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lora_nvme.parse_options(arguments)
    assert message in capsys.readouterr().err


def test_nothing_but_the_parameters_place_is_set() -> None:
    config = lora_nvme.ds_config(lora_nvme.parse_options([*NVME, "--engine", "stock"]))
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "folder"},
    }
    ours = lora_nvme.ds_config(lora_nvme.parse_options(NVME))
    assert ours.pop("peftds_ext") == {"enabled": True}
    assert ours == config
    memory = lora_nvme.ds_config(lora_nvme.parse_options(["--offload", "cpu"]))
    assert memory["zero_optimization"]["offload_param"] == {"device": "cpu"}


def test_max_in_cpu_is_handed_on_also_when_it_is_zero() -> None:
    config = lora_nvme.ds_config(lora_nvme.parse_options([*NVME, "--max-in-cpu", "0"]))
    assert config["zero_optimization"]["offload_param"]["max_in_cpu"] == 0


@pytest.mark.parametrize(("hidden", "mlp"), [(64, 2048), (256, 2048), (1024, 2816), (4096, 11008)])
def test_shape_has_the_proportions_of_llama(hidden: int, mlp: int) -> None:
    config = lora_nvme.llama_config(lora_nvme.parse_options([*NVME, "--hidden", str(hidden)]))
    assert config.intermediate_size == mlp
    assert config.num_attention_heads * config.head_dim == hidden


# ---- data -------------------------------------------------------------------------------------


def test_words_keep_their_ids_whatever_the_order_of_the_texts() -> None:
    ids = words_data.word_ids({"b": "The end.", "a": "the\n  END"}, 1000)
    assert len(ids) == 5
    assert ids[:2] == ids[2:4]
    assert words_data.word_ids({"a": "the\n  END", "b": "The end."}, 1000) == ids
    assert words_data.word_ids({"a": "the"}, 1 << 32) == [0x3C456DE6]


@pytest.mark.parametrize("vocabulary", [1, 7, 8192])
def test_ids_fit_the_vocabulary(vocabulary: int) -> None:
    ids = words_data.word_ids(python_help_topics(), vocabulary)
    assert len(ids) > 50_000
    assert {min(ids), max(ids)} <= set(range(vocabulary))
    assert len(set(ids)) > vocabulary // 3


def test_windows_are_pieces_of_the_text_taken_as_a_ring() -> None:
    windows = words_data.Windows(range(5), tokens=7, batch=40, rng=random.Random(0))
    batch = windows.next()
    assert {row[0] for row in batch} == set(range(5))
    assert all(row == [(row[0] + i) % 5 for i in range(7)] for row in batch)
    again = words_data.Windows(range(5), tokens=7, batch=40, rng=random.Random(0))
    assert again.next() == batch
    assert again.next() != batch
    with pytest.raises(ValueError, match="no ids"):
        words_data.Windows([], tokens=1, batch=1, rng=random.Random(0))


# ---- report -----------------------------------------------------------------------------------


def parameter(numel: int, location: str | None, trainable: bool = False) -> Any:
    """Stand in for a parameter under ZeRO-3; one on NVMe has next to nothing in memory."""
    part = torch.empty(1 if location == "nvme" else numel, dtype=torch.bfloat16)
    part.ds_numel, part.final_location = numel, location  # type: ignore[attr-defined]
    made = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=trainable)
    made.ds_tensor = part  # type: ignore[attr-defined]
    return made


def test_placement_counts_whole_parts_by_their_final_location() -> None:
    held = [parameter(600, "nvme"), parameter(50, None), parameter(7, "not-nvme", True)]
    assert demo_report.placement(held) == demo_report.Placement(1, 1200, 2, 114)


def test_memory_has_rows_of_their_own_for_what_lies_on_nvme() -> None:
    held = [parameter(600, "nvme"), parameter(400, "nvme"), parameter(50, None), parameter(7, None, True)]
    optimizer = SimpleNamespace(
        fp32_partitioned_groups_flat=[],
        grad_partitions_flat_buffer=torch.empty(0),
        optimizer=SimpleNamespace(state={}),
    )
    module = SimpleNamespace(parameters=lambda: iter(held))
    rows = demo_report.memory_rows(SimpleNamespace(module=module, optimizer=optimizer))
    assert rows[:3] == [
        demo_report.MemoryRow("frozen parameters", "cpu", "bfloat16", 1, 100),
        demo_report.MemoryRow("frozen parameters on NVMe", "nvme", "bfloat16", 2, 2000),
        demo_report.MemoryRow("trainable parameters", "cpu", "bfloat16", 1, 14),
    ]


def test_peak_memory_is_that_of_this_process() -> None:
    before = lora_nvme.peak_rss_bytes()
    assert before >= psutil.Process().memory_info().rss // 2
    held = bytearray(
        before - psutil.Process().memory_info().rss + (64 << 20)
    )  # zeroed pages are not resident
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    assert before + (48 << 20) < lora_nvme.peak_rss_bytes() < before + (512 << 20)


# ---- folder -----------------------------------------------------------------------------------


def test_only_what_came_later_counts(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_bytes(b"x")
    folder = swap_folder.WatchedFolder(tmp_path)
    assert folder.new() == {}
    (tmp_path / "old/new").write_bytes(b"12345")
    (tmp_path / "empty").mkdir()
    assert folder.new() == {tmp_path / "old/new": 5, tmp_path / "empty": 0}


def at_exit(run_python: Callable[..., str], folder: Path, code: str) -> str:
    """Run ``code`` with the module and a folder at hand, and return what was printed until the very end."""
    start = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(swap_folder.__file__).parent)!r})\n"
        "import swap_folder\n"
        "import atexit, subprocess, weakref\n"
        "from pathlib import Path\n"
        f"folder = swap_folder.WatchedFolder(Path({str(folder)!r}))\n"
        "made = [folder.path / name for name in ('one', 'two')]\n"
        "for path in made: path.write_bytes(bytes(50_000))\n"
    )
    return run_python(start + code).rstrip()


def test_last_look_comes_after_the_libraries_have_cleared_up(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    code = (
        "folder.tell_at_exit(ranks=1)\n"
        "atexit.register(made[0].unlink)\n"
        "class Store: pass\n"
        "store = Store()\n"
        "weakref.finalize(store, made[1].unlink)\n"
    )
    assert at_exit(run_python, tmp_path, code) == f"left in {tmp_path}: nothing"


def test_last_look_tells_what_is_left(run_python: Callable[..., str], tmp_path: Path) -> None:
    told = at_exit(run_python, tmp_path, "folder.tell_at_exit(ranks=1)")
    assert told == f"left in {tmp_path}: 2 files and folders, 0.10 MB"


def test_last_look_tells_empty_files_apart(run_python: Callable[..., str], tmp_path: Path) -> None:
    code = "folder.tell_at_exit(ranks=2)\nfor path in made: path.write_bytes(b'')\n"
    assert at_exit(run_python, tmp_path, code) == f"left in {tmp_path}: nothing but 2 empty files and folders"


def test_last_look_waits_for_other_ranks(run_python: Callable[..., str], tmp_path: Path) -> None:
    code = (
        "other = 'sleep 1; rm ' + ' '.join(map(str, made))\n"
        "subprocess.Popen(['sh', '-c', other], stdout=subprocess.DEVNULL)\n"
        "folder.tell_at_exit(ranks=2)\n"
    )
    assert at_exit(run_python, tmp_path, code) == f"left in {tmp_path}: nothing"


def test_temporary_folder_goes_with_the_process(run_python: Callable[..., str], tmp_path: Path) -> None:
    code = (
        "path = swap_folder.temporary_folder(folder.path / 'a/b')\n"
        "(path / 'file').write_bytes(b'x')\n"
        "assert path != swap_folder.temporary_folder(folder.path / 'a/b')\n"
        "print(path)\n"
    )
    path = Path(at_exit(run_python, tmp_path, code))
    assert path.parent == tmp_path / "a/b"
    assert list(path.parent.iterdir()) == []


# ---- the whole --------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--checkpointing"]], ids=["plain", "checkpointing"])
def test_losses_from_nvme_are_those_from_memory(
    tmp_path: Path, run_example: Callable[..., tuple[dict[str, Any], str]], options: list[str]
) -> None:
    memory, _ = run_example("lora_nvme.py", "--offload", "cpu", *SHAPE, *options)
    folder = tmp_path / "nvme"
    nvme, output = run_example("lora_nvme.py", "--nvme-path", str(folder), *SHAPE, *options)
    assert nvme["losses"] == memory["losses"]
    assert nvme["loss_last"] < nvme["loss_first"]
    # Two embeddings of 2048 and three MLP matrices of two layers, each 1 MiB in bf16.
    assert memory["placement"]["nvme_parameters"] == 0
    assert nvme["placement"]["nvme_parameters"] == 8
    assert nvme["placement"]["nvme_bytes"] == 8 << 20
    assert nvme["placement"]["memory_bytes"] == memory["placement"]["memory_bytes"] - (8 << 20)
    assert nvme["folder_bytes"] >= 8 << 20
    assert f"left in {folder}: nothing" in output.splitlines()[-1]
    # These two are empty, and shared by all runs that use the folder.
    left = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert left <= {"peftds_ext_swap", "peftds_ext_swap/.lock"}


def test_run_from_memory_trains_and_reports(run_example: Callable[..., tuple[dict[str, Any], str]]) -> None:
    report, output = run_example("lora_nvme.py", "--offload", "cpu", *SHAPE)
    assert (report["engine"], report["offload"], report["ranks"]) == ("peftds", "cpu", 1)
    assert len(report["losses"]) == len(report["step_seconds"]) == 10
    assert report["loss_last"] < report["loss_first"]
    assert report["folder_bytes"] == 0
    assert report["peak_rss_bytes"] > 100 << 20
    for wanted in ("step    1/10", "step   10/10", "parameters in memory", "peak memory"):
        assert wanted in output
