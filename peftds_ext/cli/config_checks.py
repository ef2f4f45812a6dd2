# SPDX-License-Identifier: Apache-2.0
"""What ``peftds doctor`` finds in a DeepSpeed configuration file."""

from __future__ import annotations

import difflib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from peftds_ext.cli.checks import Check, Status
from peftds_ext.cli.machine_checks import gib
from peftds_ext.config import SECTION, PeftdsConfig
from peftds_ext.errors import ConfigError
from peftds_ext.integrations.deepspeed.conflicts import find_conflicts
from peftds_ext.integrations.deepspeed.offload import (
    NVME_PATH,
    OPTIMIZER_NVME_PATH,
    memory_budget,
    nvme_path,
    offloads_optimizer,
    offloads_optimizer_to_nvme,
    offloads_parameters_to_nvme,
    optimizer_nvme_path,
)
from peftds_ext.integrations.deepspeed.section import parse_text, read_section
from peftds_ext.integrations.deepspeed.state_settings import check_optimizer_nvme_path, refuse_compact
from peftds_ext.integrations.deepspeed.swapper_seam import check_nvme_path
from peftds_ext.store.engine import choose_settings
from peftds_ext.store.media import Media, locate

_FILE: Final = "configuration file"


def check_config_file(path: Path) -> Iterator[Check]:
    """Whether the file can be read, our section in it, and the features that exclude the engine."""
    try:
        text = path.read_text()
        raw = parse_text(text)
    except OSError as error:
        yield Check(
            _FILE, "error", f"{path} cannot be read: {error.strerror or error}", "give a readable file"
        )
        return
    except ValueError as error:
        yield Check(_FILE, "error", f"{path} is not JSON: {error}", "correct it at the place named")
        return
    if not isinstance(raw, Mapping):
        yield Check(_FILE, "error", f"{path} is not a JSON object", 'it must start with "{"')
        return
    yield _syntax(path, text)
    config = yield from _section(raw)
    yield from _conflicts(raw, config)


def reads_pinned(path: Path | None) -> bool:
    """Tell whether training with this file pins offload buffers.

    Without a file, or with one that cannot be read, DeepSpeed's default holds: it does.
    """
    try:
        raw = parse_text(path.read_text()) if path is not None else None
    except (OSError, ValueError):
        return True
    if not isinstance(raw, Mapping):
        return True
    zero = raw.get("zero_optimization")
    offloads = (
        [zero.get(key) for key in ("offload_param", "offload_optimizer")] if isinstance(zero, dict) else []
    )
    return any(
        isinstance(offload, Mapping)
        and offload.get("device") in ("cpu", "nvme")
        and offload.get("pin_memory", True) is not False
        for offload in offloads
    )


def _syntax(path: Path, text: str) -> Check:
    try:
        json.loads(text)
    except ValueError as error:
        return Check(
            _FILE,
            "note",
            f"{path}: Hjson, which DeepSpeed reads; Transformers and Accelerate do not ({error})",
            "write it as plain JSON if the Trainer or Accelerate is to read it",
        )
    return Check(_FILE, "ok", str(path))


def _section(raw: Mapping[str, Any]) -> Generator[Check, None, PeftdsConfig]:
    """Check our section and return it; for one that is invalid, return what its author most likely wants."""
    name = f"section {SECTION}"
    switch_on = f'"{SECTION}": {{"enabled": true}}'
    try:
        config = read_section(raw)
    except ConfigError as error:
        yield Check(name, "error", str(error), "correct the key that is named")
        return PeftdsConfig(enabled=True)
    if SECTION not in raw:
        near = difflib.get_close_matches(SECTION, [str(key) for key in raw], n=1)
        if near:
            found = f'absent, so stock DeepSpeed trains; "{near[0]}" is a key that nobody reads'
            yield Check(name, "warning", found, f'write "{SECTION}" instead of "{near[0]}"')
        else:
            yield Check(name, "note", "absent: stock DeepSpeed trains", f"add {switch_on} to use the engine")
    elif not config.enabled:
        yield Check(name, "note", "disabled: stock DeepSpeed trains", f"write {switch_on} to use the engine")
    else:
        yield Check(name, "ok", "enabled")
        yield from _work(raw)
        yield from _where_from(raw, config)
        yield from _trace(config)
    return config


def _work(raw: Mapping[str, Any]) -> Iterator[Check]:
    """Whether the configuration gives the engine anything to do."""
    zero = raw.get("zero_optimization", {})
    if not isinstance(zero, Mapping | bool):
        yield Check("zero_optimization", "error", f"not an object: {zero!r}", "write an object with a stage")
        return
    if not offloads_optimizer(raw) and not offloads_parameters_to_nvme(raw):
        found = "neither the optimizer is offloaded nor are parameters on NVMe: the engine has nothing to do"
        remedy = 'set a stage from 1 to 3 and "offload_optimizer": {"device": "cpu"}'
        yield Check("zero_optimization", "warning", found, remedy)
    if offloads_parameters_to_nvme(raw):
        yield from _folder(NVME_PATH, nvme_path(raw), lambda: check_nvme_path(raw))
    if offloads_optimizer_to_nvme(raw):
        path = optimizer_nvme_path(raw)
        yield from _folder(OPTIMIZER_NVME_PATH, path, lambda: check_optimizer_nvme_path(raw))
    if offloads_parameters_to_nvme(raw) or offloads_optimizer_to_nvme(raw):
        yield from _storage_numbers(raw)
    yield from _optimizer_form(raw)


def _optimizer_form(raw: Mapping[str, Any]) -> Iterator[Check]:
    """Whether there are offloaded states that could have the form asked for."""
    if not offloads_optimizer(raw):
        try:
            refuse_compact(read_section(raw).optimizer, "the optimizer is not offloaded")
        except ConfigError as error:
            remedy = 'set "offload_optimizer": {"device": "cpu"} or "nvme", or leave the key out'
            yield Check(f"{SECTION}.optimizer", "error", str(error), remedy)


def _where_from(raw: Mapping[str, Any], config: PeftdsConfig) -> Iterator[Check]:
    """Whether weights can be in place in their checkpoint, if they are to be."""
    name = f"{SECTION}.params.source"
    if config.params.source == "checkpoint" and not offloads_parameters_to_nvme(raw):
        found = 'weights in place need stage 3 and offload_param.device "nvme"'
        yield Check(name, "error", found, f"set these, and {NVME_PATH}, or leave the key out")
    elif config.params.source == "checkpoint":
        yield Check(name, "note", "the script must build the model with peftds_ext.from_pretrained")


def _trace(config: PeftdsConfig) -> Iterator[Check]:
    """Whether the file of the trace can be made."""
    if config.trace is None:
        return
    path = Path(config.trace).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        found = f"{path} cannot be written: its folder must exist, and it must be a file's path"
        yield Check(f"{SECTION}.trace", "error", found, "give a file in a folder that this user may write to")


def _storage_numbers(raw: Mapping[str, Any]) -> Iterator[Check]:
    """Numbers of DeepSpeed's that the storage engine takes over, where they cannot be used."""
    try:
        memory_budget(raw, 1)
        choose_settings(read_section(raw).io, Path("/"), raw.get("aio"))
    except ConfigError as error:
        yield Check("storage numbers", "error", str(error), "correct the key that is named, or leave it out")


def _folder(key: str, given: str | None, check: Callable[[], None]) -> Iterator[Check]:
    """What a folder for parameters or states lies on; it is not made if it is missing."""
    try:
        check()
    except ConfigError as error:
        yield Check(key, "error", str(error), "give a folder")
        return
    path = Path(str(given)).absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found = f"{existing} is not a folder that can be written to"
        yield Check(key, "error", found, "give a folder that this user may write to")
        return
    location = locate(existing)
    free = shutil.disk_usage(existing).free
    value = (
        f"{path}: {location.file_system or 'unknown file system'}, {location.media.value}, {gib(free)} free"
    )
    if location.media is Media.MEMORY:
        remedy = "give a folder on a disk, or use the device cpu"
        yield Check(key, "warning", f"{value}: this is the host's memory", remedy)
    elif path != existing:
        yield Check(key, "note", f"{value}; the folder will be made below {existing}")
    else:
        yield Check(key, "ok", value)


def _conflicts(raw: Mapping[str, Any], config: PeftdsConfig) -> Iterator[Check]:
    outcomes: dict[str, tuple[Status, str]] = {
        "error": ("error", "the engine refuses to start"),
        "stock": ("warning", "stock DeepSpeed trains instead of the engine"),
    }
    status, outcome = outcomes[config.on_conflict]
    if not config.enabled:
        status, outcome = "note", "the engine could not run with it"
    for conflict in find_conflicts(raw):
        yield Check(conflict.key, status, f"{conflict.reason}: {outcome}", conflict.remedy)
