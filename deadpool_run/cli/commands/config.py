"""`deadpool-run config show`: every option with its value and source."""

import os
import sys
from typing import Annotated

import typer

from deadpool_run.cli.commands.launch import resolved


def config_show(
    *,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="As in a run.")] = None,
    no_config: Annotated[bool | None, typer.Option("--no-config", help="As in a run.")] = None,
) -> None:
    """Print every option with the value that a run would use, and its source."""
    from deadpool_run.cli.launch.dry_run import settings_lines  # noqa: PLC0415 - a launch does not need it

    values = resolved({"config": config, "no_config": no_config}, os.environ)
    sys.stdout.write("".join(f"{line}\n" for line in settings_lines(values)))
