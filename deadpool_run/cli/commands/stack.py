"""`deadpool-run stack`: the stacks of a worker's threads."""

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.runs.find import RunDir, RunId, connect_run
from deadpool_run.cli.runs.stacks import NoStackError, stacks_of
from deadpool_run.errors import UsageError
from deadpool_run.view.client import ControlClient


def stack(
    rank: Annotated[
        int | None,
        typer.Argument(metavar="[RANK]", min=0, show_default=False, help="Default: all ranks of this machine."),
    ] = None,
    *,
    run_dir: RunDir = None,
    run_id: RunId = None,
) -> None:
    """Print the Python stacks of all threads of a rank's worker, without stopping it. They show where it waits or hangs.

    Run it on the rank's machine. It works also while a C function keeps the interpreter.
    """
    with connect_run(run_dir, run_id, os.environ) as client:
        status = client.ask({"do": "status"})
        here = _node(client, status)
    ranks = status.get("ranks", [])
    if rank is not None:
        if rank >= len(ranks):
            raise UsageError(f"there is no rank {rank}\nranks are 0 to {len(ranks) - 1}")
        if here is not None and ranks[rank]["node"] != here:
            raise UsageError(f"rank {rank} is on node {ranks[rank]['node']}, not on {here}\nrun this command there")
    chosen = [each for each in ranks if each["rank"] == rank or (rank is None and here in (None, each["node"]))]
    failed = 0
    for each in chosen:
        what = f"rank {each['rank']} (pid {each['pid']}, step {each['step']}, {each['phase']})"
        try:
            sys.stdout.write(f"--- {what} ---\n{stacks_of(each['pid'])}\n")
        except NoStackError as error:
            failed += 1
            tell(f"{what}: {error}")
    if failed == len(chosen):
        raise typer.Exit(1)


def _node(client: ControlClient, status: Mapping[str, Any]) -> str | None:
    """Return the name of this machine's node; None in a run of one machine."""
    leader = status.get("coordinator")
    if not leader:
        return None
    name = client.run_dir.name
    return name.removeprefix("node-") if name.startswith("node-") else str(leader.get("node"))
