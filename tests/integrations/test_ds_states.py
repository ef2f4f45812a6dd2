# SPDX-License-Identifier: Apache-2.0
"""Optimizer states on NVMe and in compact forms train the same whatever the tier; checkpoints between all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_models import (
    furthest,
    gradients,
    llama,
    lora,
    masters,
    moments,
    relative,
    tokens,
    train_tokens,
    trainable,
)
from ds_runner import Runner, compiler_missing
from ds_worker import CPU_ADAM, Run

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing())
FORMS = [("fp32", "fp32"), ("fp32", "split"), ("bf16", "split"), ("int8", "split"), ("int8", "fp32")]
BEFORE, AFTER = 3, 3


def config_of(
    run: Run,
    tier: str,
    states: str | None = None,
    master: str | None = None,
    params: str = "cpu",
    dtype: str = "bf16",
    sub_group_size: int = 1000,
    stage: int = 3,
    **changes: Any,
) -> dict[str, Any]:
    disk = str(run.tmp / "disk")
    offload: dict[str, Any] = {"device": tier} | ({"nvme_path": disk} if tier == "nvme" else {})
    zero: dict[str, Any] = {"offload_optimizer": offload}
    if stage == 3:
        zero["sub_group_size"] = sub_group_size
    if params == "nvme":
        zero["offload_param"] = {"device": "nvme", "nvme_path": disk, "max_in_cpu": 0}
    elif params == "none":
        zero["offload_param"] = {"device": "none"}
    if dtype == "fp16":
        changes["fp16"] = {"enabled": True, "initial_scale_power": 6}
    config = run.config(dtype, stage, zero=zero, **changes)
    if run.ours:
        optimizer = {"states": states, "master": master}
        config["peftds_ext"]["optimizer"] = {key: value for key, value in optimizer.items() if value}
    return config


def engine_of(run: Run, seed: int = 1, hidden: int = 32, **options: Any) -> Any:
    return run.initialize(lora(llama(hidden=hidden), seed=seed), config_of(run, **options))


def train(run: Run, steps: int = 6, **options: Any) -> dict[str, Any]:
    engine = engine_of(run, **options)
    accumulation = engine.gradient_accumulation_steps()
    record = train_tokens(engine, tokens(steps * accumulation))
    record["moments"], record["bytes"] = moments(engine), None
    if hasattr(engine.optimizer, "peftds_state_bytes"):  # ZeRO-1 and 2 in the plain form are stock's own
        record["bytes"] = engine.optimizer.peftds_state_bytes()
    record["elements"] = sum(getattr(p, "ds_numel", p.numel()) for _, p in trainable(engine))
    engine.destroy()
    record["left"] = [str(path.name) for path in run.tmp.rglob("data.bin")]
    return record


def stats_of(run: Run, tier: str, stage: int = 3, **options: Any) -> dict[str, Any]:
    import peftds_ext

    engine = engine_of(run, tier=tier, stage=stage, **options)
    before = peftds_ext.stats(engine)
    train_tokens(engine, tokens(2))
    after = peftds_ext.stats(engine)
    return {"before": before.model_dump(), "after": after.model_dump(), "report": str(after)}


@pytest.mark.parametrize(("tier", "stage"), [("nvme", 3), ("nvme", 2), ("cpu", 3)])
def test_statistics_tell_of_the_states(runner: Runner, tier: str, stage: int) -> None:
    found = runner.one(stats_of, tier=tier, stage=stage, states="int8").result
    before, after = found["before"]["optimizer"], found["after"]["optimizer"]
    assert (before["steps"], before["last_step"]) == (0, None)
    assert after["steps"] == 2
    assert "as split masters and int8 moments" in after["form"]
    step = after["last_step"]
    disk = after["disk_bytes"]
    assert step["read_bytes"] == step["written_bytes"] == disk
    assert (disk > 0) == (tier == "nvme")
    assert (after["memory_bytes"] > 0) == (tier == "cpu")
    assert 0 <= step["waited_seconds"] <= step["seconds"]
    assert "optimizer states: " in found["report"]
    assert f"{'on the disk' if tier == 'nvme' else 'in memory'}" in found["report"]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    assert furthest(one["last"], other["last"]) == 0.0
    assert furthest(one["moments"], other["moments"]) == 0.0


@pytest.fixture(scope="module")
def in_memory(runner: Runner) -> Any:
    """Run with the states in memory, once per options."""
    done: dict[str, Any] = {}

    def run(**options: Any) -> Any:
        key = repr(sorted(options.items()))
        if key not in done:
            done[key] = runner.one(train, tier="cpu", **options).result
        return done[key]

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 50},
        {"gradient_accumulation_steps": 3},
        {"dtype": "fp16"},
        {"params": "none"},
        {"dtype": "fp32"},
        {"sub_group_size": 10**9},
    ],
    ids=lambda options: "-".join(map(str, *options.items())),
)
def test_fp32_on_nvme_is_bit_equal_to_memory(runner: Runner, in_memory: Any, options: dict[str, Any]) -> None:
    disk = runner.one(train, tier="nvme", **options)
    same(disk.result, in_memory(**options))
    per_element = disk.result["bytes"]["disk"] / disk.result["elements"]
    assert disk.result["bytes"]["memory"] == 0
    assert per_element >= 12
    assert disk.result["left"] == []
    assert disk.said("optimizer states on the disk") == 1


def test_parameters_and_states_on_nvme(runner: Runner) -> None:
    options = {"hidden": 512, "params": "nvme", "steps": 3, "sub_group_size": 10**9}
    disk, memory = (runner.one(train, tier=tier, **options).result for tier in ("nvme", "cpu"))
    same(disk, memory)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp16"), (2, "fp32")])
def test_zero_1_and_2_on_nvme_are_bit_equal_to_memory(
    runner: Runner, in_memory: Any, stage: int, dtype: str
) -> None:
    options = {"stage": stage, "dtype": dtype, "gradient_accumulation_steps": 2}
    disk = runner.one(train, tier="nvme", **options)
    same(disk.result, in_memory(**options))
    assert disk.result["bytes"]["disk"] >= 12 * disk.result["elements"]
    assert disk.result["left"] == []


@pytest.mark.parametrize(
    ("stage", "states", "master"),
    [*((3, *form) for form in FORMS[1:]), (2, "fp32", "split"), (2, "int8", "split")],
)
def test_compact_states_are_the_same_on_both_tiers(
    runner: Runner, in_memory: Any, stage: int, states: str, master: str
) -> None:
    memory = in_memory(states=states, master=master, stage=stage)
    same(runner.one(train, tier="nvme", states=states, master=master, stage=stage).result, memory)
    exact = in_memory(stage=stage)
    if states == "fp32":
        same(memory, exact)
    else:
        assert 0 < furthest(memory["last"], exact["last"]) < 4e-3  # steps are up to 1e-3 each
        assert relative(memory["losses"], exact["losses"]) < 1e-2


@pytest.mark.parametrize(
    ("states", "master", "most"),
    [("fp32", "fp32", 12.0), ("fp32", "split", 10.0), ("bf16", None, 6.0), ("int8", None, 4.1)],
)
def test_bytes_per_element_in_memory(in_memory: Any, states: str, master: str | None, most: float) -> None:
    result = in_memory(states=states, master=master, hidden=256, steps=1, sub_group_size=10**9)
    assert result["bytes"]["disk"] == 0
    assert result["bytes"]["memory"] / result["elements"] <= most


def test_an_fp32_weight_is_its_own_master(in_memory: Any) -> None:
    options = {"dtype": "fp32", "steps": 4}
    shared = in_memory(master="split", **options)
    same(shared, in_memory(**options))
    assert shared["bytes"]["memory"] == 8 * shared["elements"]


# -- checkpoints -------------------------------------------------------------------------------------------


def train_and_save(run: Run, folder: str, tag: str = "step", **options: Any) -> dict[str, Any]:
    engine = engine_of(run, **options)
    batches = tokens(BEFORE + AFTER)
    train_tokens(engine, batches[:BEFORE])
    saved = {"masters": masters(engine), "moments": moments(engine)}
    engine.save_checkpoint(folder, tag=tag)
    return {"saved": saved, "resumed": train_tokens(engine, batches[BEFORE:]), "moments": moments(engine)}


def load_and_train(run: Run, folder: str, tag: str = "step", **options: Any) -> dict[str, Any]:
    engine = engine_of(run, seed=99, **options)
    batches = tokens(BEFORE + AFTER)
    train_tokens(engine, batches[:1])
    path, _ = engine.load_checkpoint(folder, tag=tag)
    if path is None:
        raise AssertionError("nothing was loaded")
    saved = {"masters": masters(engine), "moments": moments(engine)}
    return {"saved": saved, "resumed": train_tokens(engine, batches[BEFORE:]), "moments": moments(engine)}


@pytest.mark.parametrize(
    ("tier", "stage", "states", "master"),
    [
        ("cpu", 3, "bf16", "split"),
        ("cpu", 3, "int8", "split"),
        ("nvme", 3, "fp32", "fp32"),
        ("nvme", 3, "int8", "fp32"),
        ("nvme", 2, "fp32", "split"),
        ("nvme", 2, "int8", "split"),
        ("cpu", 1, "bf16", "split"),
    ],
)
def test_resume_is_bit_exact(
    runner: Runner, tmp_path: Path, tier: str, stage: int, states: str, master: str
) -> None:
    options = {"tier": tier, "states": states, "master": master, "folder": str(tmp_path), "stage": stage}
    saved = runner.one(train_and_save, **options).result
    loaded = runner.one(load_and_train, **options).result
    for name in ("masters", "moments"):
        assert furthest(loaded["saved"][name], saved["saved"][name]) == 0.0
    assert loaded["resumed"]["losses"] == saved["resumed"]["losses"]
    assert furthest(loaded["resumed"]["last"], saved["resumed"]["last"]) == 0.0
    assert furthest(loaded["moments"], saved["moments"]) == 0.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("nvme", "fp32", "fp32"), ("cpu", "fp32", "fp32")),
        (("cpu", "fp32", "fp32"), ("nvme", "fp32", "split")),
        (("cpu", "int8", "split"), ("nvme", "fp32", "fp32")),
        (("nvme", "fp32", "fp32"), ("cpu", "bf16", "split")),
    ],
    ids=str,
)
def test_checkpoints_between_tiers_and_forms(
    runner: Runner, tmp_path: Path, before: tuple[str, str, str], after: tuple[str, str, str]
) -> None:
    def options(form: tuple[str, str, str]) -> dict[str, Any]:
        return {"tier": form[0], "states": form[1], "master": form[2], "folder": str(tmp_path)}

    saved = runner.one(train_and_save, **options(before)).result
    outcome = runner.one(load_and_train, **options(after))
    loaded = outcome.result
    assert furthest(loaded["saved"]["masters"], saved["saved"]["masters"]) == 0.0
    assert relative(loaded["resumed"]["losses"], saved["resumed"]["losses"]) < 1e-2
    if before[1] == after[1]:
        assert furthest(loaded["moments"], saved["moments"]) == 0.0
    else:
        assert outcome.said(f"moments are {before[1]} and become {after[1]}") == 1
        if after[1] == "fp32":
            assert furthest(loaded["saved"]["moments"], saved["saved"]["moments"]) == 0.0


@needs_compiler
@pytest.mark.parametrize(("saver", "loader"), [("ours", "stock"), ("stock", "ours")])
def test_checkpoints_are_exchanged_with_stock_cpu_offload(
    runner: Runner, tmp_path: Path, saver: str, loader: str
) -> None:
    def options(mode: str) -> dict[str, Any]:
        tier = "nvme" if mode == "ours" else "cpu"
        return {"tier": tier, "folder": str(tmp_path), "adam": CPU_ADAM}

    saved = runner.one(train_and_save, saver, **options(saver)).result
    loaded = runner.one(load_and_train, loader, **options(loader)).result
    for name in ("masters", "moments"):
        assert furthest(loaded["saved"][name], saved["saved"][name]) == 0.0
    assert relative(loaded["resumed"]["losses"], saved["resumed"]["losses"]) <= 1e-4


# -- who looks at states, or steps them, by other means ------------------------------------------------


def look_and_set(run: Run, tier: str, **options: Any) -> dict[str, Any]:
    """Read and change masters, moments and gradients between backward and step, and after it."""
    from deepspeed.utils import (
        safe_get_full_grad,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )

    engine = engine_of(run, tier=tier, **options)
    parameter = next(p for p in engine.module.parameters() if p.requires_grad)
    seen: dict[str, Any] = {"losses": []}
    for number, batch in enumerate(tokens(4)):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        seen[f"gradients {number}"] = gradients(engine)
        if number == 1:
            safe_set_full_grad(parameter, safe_get_full_grad(parameter).float() * 2)
            seen["looked"] = masters(engine)  # must not lose the gradient that was set
        engine.step()
        if number == 2:
            ones = torch.ones(parameter.ds_shape)
            safe_set_full_fp32_param(parameter, ones * 0.25)
            safe_set_full_optimizer_state(parameter, ones * 0.5, "exp_avg")
        seen[f"masters {number}"], seen[f"moments {number}"] = masters(engine), moments(engine)
        seen["losses"].append(float(loss))
    return seen


@pytest.mark.parametrize(("states", "master"), [("fp32", "fp32"), ("fp32", "split")])
def test_safe_get_and_set_as_with_memory(runner: Runner, states: str, master: str) -> None:
    disk = runner.one(look_and_set, tier="nvme", states=states, master=master).result
    memory = runner.one(look_and_set, tier="cpu").result
    # A split master that is set is a weight that is set: the next forward sees it, not only the next step.
    alike = 4 if master == "fp32" else 3
    assert disk["losses"][:alike] == memory["losses"][:alike]
    for name, expected in memory.items():
        if name != "losses" and (alike == 4 or not name.endswith("3")):
            assert furthest(disk[name], expected) == 0.0, name


def step_with_hooks(run: Run, tier: str, hooked: bool, **options: Any) -> dict[str, Any]:
    """Let somebody watch ``optimizer.step()``, which makes DeepSpeed call it."""
    engine = engine_of(run, tier=tier, **options)
    calls: list[int] = []
    if hooked:
        engine.optimizer.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    record = train_tokens(engine, tokens(4))
    return {**record, "moments": moments(engine), "calls": len(calls)}


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_step_hooks_see_whole_states(runner: Runner, master: str) -> None:
    hooked = runner.one(step_with_hooks, tier="nvme", hooked=True, master=master).result
    plain = runner.one(step_with_hooks, tier="cpu", hooked=False).result
    assert hooked.pop("calls") >= 4
    same(hooked, plain)


# -- refusals ------------------------------------------------------------------------------------------------


def refused(run: Run, **changes: Any) -> str:
    config = config_of(run, "cpu", states="int8")
    zero = config["zero_optimization"] | changes
    config["zero_optimization"] = {key: value for key, value in zero.items() if value is not None}
    try:
        run.initialize(lora(llama()), config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offload_optimizer": {"device": "none"}}, "the optimizer is not offloaded"),
        ({"stage": 0, "offload_optimizer": None, "offload_param": None}, "the optimizer is not offloaded"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio below 1"),
        ({"offload_optimizer": {"device": "nvme"}}, "offload_optimizer.nvme_path: missing"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_had_is_refused(runner: Runner, changes: dict[str, Any], text: str) -> None:
    said = runner.one(refused, **changes).result
    assert said.startswith("ConfigError")
    assert text in said


# -- steps that overlap the next forward ---------------------------------------------------------------------


def overlapped(
    run: Run, tier: str, overlap: bool | None, slow: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Train with looks at everything between steps; ``slow`` makes each chunk of a step take so long."""
    import time

    import deepspeed

    from peftds_ext import ops

    persistent = options.pop("persistent", 0)
    model = lora(llama(), seed=1)
    config = config_of(run, tier, gradient_accumulation_steps=2, **options)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = persistent
    if overlap is not None:
        config["peftds_ext"].setdefault("optimizer", {})["overlap"] = overlap
    engine = run.initialize(model, config)
    kernel, calls = ops.adamw_step_, []

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(slow)
        calls.append(torch.is_grad_enabled())
        kernel(*args, **kwargs)

    ops.adamw_step_ = slowly
    seen: dict[str, Any] = {"losses": [], "late": engine.optimizer._peftds_late is not None, "pending": 0}
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    for number, batch in enumerate(tokens(12)):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        seen["losses"].append(float(loss.detach()))
        late = engine.optimizer._peftds_late
        if late is not None and late._running is not None and not late._running.done():
            seen["pending"] += 1
        if number == 3:
            seen["masters"] = masters(engine)
        elif number == 5:
            with deepspeed.zero.GatheredParameters(parameters):
                seen["gathered"] = {str(i): p.detach().clone() for i, p in enumerate(parameters)}
        elif number == 7:
            engine.eval()
            with torch.no_grad():
                seen["losses"].append(float(engine(input_ids=batch, labels=batch).loss))
            engine.train()
        elif number == 9:
            engine.save_checkpoint(str(run.tmp / "saved"), tag="nine")
    seen["last"], seen["moments"] = masters(engine), moments(engine)
    engine.load_checkpoint(str(run.tmp / "saved"), tag="nine")
    batch = tokens(1)[0]
    seen["losses"].append(float(engine(input_ids=batch, labels=batch).loss.detach()))
    engine.destroy()
    return seen


@pytest.mark.parametrize(
    ("tier", "options"),
    [
        ("nvme", {}),
        ("nvme", {"states": "int8"}),
        ("nvme", {"dtype": "fp16"}),
        ("cpu", {}),
        ("cpu", {"states": "bf16"}),
        ("nvme", {"persistent": 10**6}),
    ],
    ids=str,
)
def test_overlap_changes_nothing(runner: Runner, tier: str, options: dict[str, Any]) -> None:
    late = runner.one(overlapped, tier=tier, overlap=True, slow=0.02, **options)
    plain = runner.one(overlapped, tier=tier, overlap=False, **options).result
    assert late.said("steps overlap the next forward") == 1
    assert late.result["late"]
    assert not plain["late"]
    assert late.result["pending"] > 0
    assert late.result["losses"] == plain["losses"]
    for name in ("masters", "gathered", "last", "moments"):
        assert furthest(late.result[name], plain[name]) == 0.0, name


@pytest.mark.parametrize(
    ("tier", "options", "expected"),
    [
        ("nvme", {}, True),
        ("cpu", {}, False),
        ("nvme", {"persistent": 10**6}, False),
        ("nvme", {"stage": 3, "params": "none"}, False),
    ],
    ids=str,
)
def test_when_steps_overlap_by_themselves(
    runner: Runner, tier: str, options: dict[str, Any], expected: bool
) -> None:
    assert runner.one(overlapped, tier=tier, overlap=None, **options).result["late"] is expected


def fail_late(run: Run, chunk: int) -> list[str]:
    """Let a transfer fail behind the caller's back, and return what later calls raise."""
    model = lora(llama(), seed=1)
    config = config_of(run, "nvme", sub_group_size=200)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine = run.initialize(model, config)
    batches = tokens(3)
    engine.backward(engine(input_ids=batches[0], labels=batches[0]).loss)
    engine.step()
    masters(engine)
    extents = engine.optimizer._peftds_states._store._file._extents
    list(extents.values())[chunk].written = False  # a read of it is refused
    engine.backward(engine(input_ids=batches[1], labels=batches[1]).loss)
    engine.step()
    said = []
    for attempt in (
        lambda: engine(input_ids=batches[2], labels=batches[2]),
        lambda: engine(input_ids=batches[2], labels=batches[2]),
        lambda: masters(engine),
        engine.step,
    ):
        try:
            attempt()
        except Exception as error:
            said.append(type(error).__name__)
        else:
            said.append("")
    return said


def test_a_late_step_that_fails_is_told_to_whoever_comes_next(runner: Runner) -> None:
    assert runner.one(fail_late, chunk=-1, timeout=60).result == ["StateLostError"] * 4


def test_a_late_step_that_fails_before_it_has_changed_anything_is_told_until_it_succeeds(
    runner: Runner,
) -> None:
    assert runner.one(fail_late, chunk=0, timeout=60).result == ["StorageError"] * 4


def fail_and_go_on(run: Run, fail: bool, late: bool, stage: int, dtype: str) -> dict[str, Any]:
    """Let the second step fail before it has changed anything, and make it again."""
    changes = {"fp16": {"enabled": True, "initial_scale_power": 6}} if dtype == "fp16" else {}
    config = config_of(run, "nvme", stage=stage, dtype=dtype, gradient_clipping=0.01, **changes)
    config["peftds_ext"]["optimizer"] = {"overlap": late}
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine = run.initialize(lora(llama(), seed=1), config)
    record = next(iter(engine.optimizer._peftds_states._store._file._extents.values()))
    losses, errors = [], []
    for number, batch in enumerate(tokens(4)):
        loss = engine(input_ids=batch, labels=batch).loss
        losses.append(float(loss.detach()))
        engine.backward(loss)
        record.written = not (fail and number == 1)  # a read of it is refused
        for attempt in (engine.step, lambda: masters(engine)):
            try:
                attempt()
            except Exception as error:
                errors.append(type(error).__name__)
                record.written = True
                attempt()
    return {"losses": losses, "errors": errors, "masters": masters(engine), "moments": moments(engine)}


@pytest.mark.parametrize(
    ("stage", "late", "dtype"),
    [(3, False, "bf16"), (3, True, "bf16"), (2, False, "fp16"), (1, False, "bf16")],
)
def test_a_step_that_failed_is_made_again(runner: Runner, stage: int, late: bool, dtype: str) -> None:
    options = {"late": late, "stage": stage, "dtype": dtype, "timeout": 60}
    failed = runner.one(fail_and_go_on, fail=True, **options).result
    smooth = runner.one(fail_and_go_on, fail=False, **options).result
    assert failed["errors"] == ["StorageError"]
    assert smooth["errors"] == []
    assert failed["losses"] == smooth["losses"]
    for name in ("masters", "moments"):
        assert furthest(failed[name], smooth[name]) == 0.0


def freeze_after_step(run: Run, overlap: bool) -> list[Any]:
    """Freeze adapters while a step that trains them is under way, and look at what they do and are."""
    import time

    import deepspeed

    from peftds_ext import ops

    config = config_of(run, "nvme")
    config["peftds_ext"]["optimizer"] = {"overlap": overlap}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    engine = run.initialize(lora(llama(), seed=1), config)
    kernel = ops.adamw_step_
    ops.adamw_step_ = lambda *args, **kwargs: (time.sleep(0.05 * overlap), kernel(*args, **kwargs))[1]
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    seen: list[Any] = []
    for batch in tokens(2):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        for parameter in parameters:
            parameter.requires_grad_(False)
        if not seen:
            with torch.no_grad():
                seen.append(float(engine(input_ids=batch, labels=batch).loss))
        with deepspeed.zero.GatheredParameters(parameters):
            seen.append([parameter.detach().clone() for parameter in parameters])
        for parameter in parameters:
            parameter.requires_grad_(True)
    return seen


def test_frozen_parameters_are_waited_for_as_well(runner: Runner) -> None:
    late, plain = (runner.one(freeze_after_step, overlap=overlap).result for overlap in (True, False))
    assert late[0] == plain[0]
    for ours, expected in zip(late[1:], plain[1:], strict=True):
        assert all(map(torch.equal, ours, expected))
