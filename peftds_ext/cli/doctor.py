# SPDX-License-Identifier: Apache-2.0
"""``peftds doctor``: says whether this machine and a configuration are fit to train with the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peftds_ext.cli.checks import Check, run_checks

_STYLES: Final = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else, to standard output.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="A DeepSpeed configuration file to check as well.")
    ] = None,
) -> None:
    """Check versions, compiled kernels, memory limits, GPUs and a DeepSpeed configuration.

    The exit status is 1 if training with the engine would fail, else 0.
    """
    with _stdout_to_stderr():
        checks = run_checks(config)
    ok = all(check.status != "error" for check in checks)
    if as_json:
        typer.echo(
            json.dumps({"ok": ok, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2)
        )
    else:
        _print_table(checks, ok=ok)
    raise typer.Exit(0 if ok else 1)


def _print_table(checks: Sequence[Check], *, ok: bool) -> None:
    table = Table("check", "status", "found")
    for check in checks:
        # Text, not markup: values hold square brackets.
        found = Text(check.value)
        if check.remedy:
            found.append(f"\nremedy: {check.remedy}", style="dim")
        table.add_row(Text(check.name), Text(check.status, style=_STYLES[check.status]), found)
    console = Console()
    console.print(table)
    console.print(
        "Nothing was found that would stop training." if ok else "Training with the engine would fail."
    )


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what libraries print while they are imported to standard error, child processes included."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
