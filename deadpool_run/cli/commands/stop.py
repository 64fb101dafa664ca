"""`deadpool-run stop`: ends a live run in order."""

import os
import sys
from typing import Annotated

import typer

from deadpool_run.cli.commands.wait import wait_for
from deadpool_run.cli.confirm import confirmed
from deadpool_run.cli.runs.find import RunDir, RunId, connect_run, run_at
from deadpool_run.errors import RequestRefusedError


def stop(
    *,
    run_dir: RunDir = None,
    run_id: RunId = None,
    save: Annotated[
        bool, typer.Option("--save", help="Refuse if the run has no --durable, so that nothing is lost.")
    ] = False,
    wait_for_end: Annotated[bool, typer.Option("--wait", help="Return when the run has ended.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask, even on a terminal.")] = False,
) -> None:
    """Stop a live run, as SIGTERM of its launcher does: workers get SIGTERM, and --shutdown-timeout to end.

    With --durable the run writes a last checkpoint, and the same command resumes from it.
    """
    with connect_run(run_dir, run_id, os.environ) as client:
        run = run_at(client.run_dir)
        if save and client.ask({"do": "status"}).get("durable") is None:
            raise RequestRefusedError(
                f"run {run.name} is not stopped: it has no --durable, so its progress would be lost\n"
                "stop it without --save, or start it with --durable DIR"
            )
        if not yes:
            confirmed(f"Stop run {run.name}?")
        client.ask({"do": "stop"})
    sys.stdout.write(f"run {run.name} is stopping\n")
    if wait_for_end:
        wait_for(run, None)
