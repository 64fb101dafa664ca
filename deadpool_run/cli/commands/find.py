"""Finding the run that a command is about."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.cli.options.machine import state_dir
from deadpool_run.view.client import ControlClient, connect

RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="The run's directory. Default: $DEADPOOL_RUN_DIR, else the newest live run."
    ),
]


def find_run(run_dir: Path | None, environment: Mapping[str, str]) -> ControlClient:
    """Connect to the named run, else to $DEADPOOL_RUN_DIR, else to the newest live run. Raises `NoSuchRunError`."""
    inherited = environment.get("DEADPOOL_RUN_DIR")
    return connect(run_dir or (Path(inherited) if inherited else None), state_dir(environment))
