# SPDX-License-Identifier: Apache-2.0
"""The ``peftds`` command: its sub-commands, and what an error looks like.

Exit status: 0 done, 1 an error of this package (one line on stderr), 2 the command line itself is wrong.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from peftds_ext import __version__
from peftds_ext.cli.doctor import doctor
from peftds_ext.cli.plan import plan
from peftds_ext.cli.verify import verify
from peftds_ext.errors import PeftdsError


class _ErrorLineGroup(TyperGroup):
    """Turns a ``PeftdsError`` of any sub-command into one line on stderr and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PeftdsError as error:
            typer.echo(f"peftds: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="peftds",
    cls=_ErrorLineGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Offload engine for parameter-efficient fine-tuning with DeepSpeed ZeRO.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peftds_ext {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a sub-command."""


app.command()(plan)
app.command()(doctor)
app.command()(verify)


def main() -> None:
    """Entry point of the ``peftds`` script."""
    app(prog_name="peftds")


if __name__ == "__main__":
    main()
