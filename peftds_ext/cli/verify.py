# SPDX-License-Identifier: Apache-2.0
"""``peftds verify``: compares swap files with the checksums that were taken when they were written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peftds_ext.errors import PeftdsError
from peftds_ext.store import verify as stores

_SHOWN_DAMAGES: Final = 50


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A store folder, or the nvme_path below which stores lie.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else, to standard output.")
    ] = False,
) -> None:
    """Check the swap files of running or ended processes. Reads only.

    The exit status is 1 if anything is damaged, 2 if DIR holds no store or nothing could be checked, else 0.
    """
    try:
        reports = stores.verify(folder)
    except PeftdsError as error:
        typer.echo(f"peftds: {_printable(str(error))}", err=True)
        raise typer.Exit(2) from None
    ok = all(report.intact for report in reports)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "stores": [_as_json(report) for report in reports]}, indent=2))
    else:
        _print_report(Console(highlight=False), reports)
    raise typer.Exit(0 if ok else 1)


def _as_json(report: stores.StoreReport) -> dict[str, Any]:
    return {
        "folder": str(report.folder),
        "intact": report.intact,
        "records": report.records,
        "checked_records": report.checked_records,
        "checked_bytes": report.checked_bytes,
        "skipped": list(report.skipped),
        "damage": [
            {
                "kind": damage.kind,
                "path": str(damage.path),
                "reason": damage.reason,
                "key": damage.key,
                "offset": damage.offset,
                "length": damage.length,
            }
            for damage in report.damage
        ],
    }


def _print_report(console: Console, reports: Sequence[stores.StoreReport]) -> None:
    table = _table("store", "records", "checked", "bytes read", "skipped", "found")
    for report in reports:
        found = Text("intact", style="green") if report.intact else Text("damaged", style="bold red")
        counts = (report.records, report.checked_records, report.checked_bytes, len(report.skipped))
        table.add_row(Text(_printable(report.folder.name)), *(f"{count:,}" for count in counts), found)
    console.print(table)
    damages = [damage for report in reports for damage in report.damage]
    if damages:
        console.print(_damage_table(damages[:_SHOWN_DAMAGES]))
    if len(damages) > _SHOWN_DAMAGES:
        console.print(f"and {len(damages) - _SHOWN_DAMAGES:,} more; --json prints all", soft_wrap=True)
    if any(report.skipped for report in reports):
        console.print("Skipped records are rewritten during the run and have no checksums.", soft_wrap=True)
    console.print(_verdict(reports), soft_wrap=True)


def _damage_table(damages: Sequence[stores.Damage]) -> Table:
    table = _table("file", "record", "offset", "length", "damage")
    for damage in damages:
        place = ("" if number is None else str(number) for number in (damage.offset, damage.length))
        file = f"{damage.path.parent.name}/{damage.path.name}"
        table.add_row(*(Text(_printable(text)) for text in (file, damage.key or "", *place, damage.reason)))
    return table


def _table(*headers: str) -> Table:
    """Start a table that never cuts a text short: on a narrow terminal words go on in the next line."""
    table = Table()
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _verdict(reports: Sequence[stores.StoreReport]) -> str:
    broken = sum(not report.intact for report in reports)
    if broken:
        return f"{broken} of {len(reports)} store(s) damaged: do not trust what was computed from them."
    return f"{len(reports)} store(s): every block that has a checksum is as it was written."


def _printable(text: str) -> str:
    """Escape what would steer the terminal, or cannot be encoded: keys and names come from files."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
