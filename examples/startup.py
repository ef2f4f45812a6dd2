# SPDX-License-Identifier: Apache-2.0
"""What the example scripts share besides their report: options, the process group, the exit status."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import transformers

from peftds_ext.errors import PeftdsError

Options = TypeVar("Options", bound="RunOptions")


@dataclass(frozen=True)
class RunOptions:
    """The part of the command line that all scripts have."""

    engine: str
    offload: str
    nvme_path: Path | None
    steps: int
    batch: int
    lr: float
    seed: int
    json: Path | None

    @property
    def offload_param(self) -> dict[str, Any]:
        """DeepSpeed's section of this name: where parameters lie between their uses."""
        if self.nvme_path is None:
            return {"device": "cpu"}
        return {"device": "nvme", "nvme_path": str(self.nvme_path)}


def folder(text: str) -> Path:
    if not text:  # which would be the current folder
        raise argparse.ArgumentTypeError("a folder is needed")
    return Path(text)


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    offload: str,
    nvme_path: str,
    steps: int,
    batch: int,
    lr: float,
    places: Sequence[str] = ("cpu", "nvme"),
) -> None:
    """Add the options of :class:`RunOptions`; ``nvme_path`` says what happens when that one is left out."""
    add = parser.add_argument
    add("--engine", choices=("peftds", "stock"), default="peftds", help="stock is plain DeepSpeed")
    add("--offload", choices=places, default=offload, help="of parameters (default: %(default)s)")
    add("--nvme-path", type=folder, metavar="PATH", help=f"folder for --offload nvme ({nvme_path})")
    add("--steps", type=positive, default=steps, help="training steps (default: %(default)s)")
    add("--batch", type=positive, default=batch, help="texts per step and rank (default: %(default)s)")
    add("--lr", type=float, default=lr, help="peak learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it


def parse_values(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Parse the command line; refuse a path that is not used, and what plain DeepSpeed does not have."""
    values = vars(parser.parse_args(arguments))
    del values["local_rank"]
    if values["nvme_path"] is not None and values["offload"] == "cpu":
        parser.error("--nvme-path goes with --offload nvme and not with cpu")
    if values["offload"] == "checkpoint" and values["engine"] != "peftds":
        parser.error("--offload checkpoint goes with --engine peftds alone")
    return values


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def join_process_group() -> None:
    """Join the launcher's processes, or become a group of one when there is no launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    for name, value in {"MASTER_PORT": free_port, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}.items():
        os.environ.setdefault(name, str(value))
    deepspeed.init_distributed()


def quiet() -> None:
    """Leave only warnings of the libraries, and not those that a user can do nothing about."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|torch\.distributed")
    schedule = "Attempting to get learning rate from scheduler before it has started"
    logging.getLogger("DeepSpeed").addFilter(lambda record: schedule not in record.getMessage())


def run_script(run: Callable[[Options], int], options: Options) -> int:
    """Return what ``run`` returns, or tell in one line what the user can mend and return 2."""
    quiet()
    try:
        return run(options)
    except (PeftdsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
