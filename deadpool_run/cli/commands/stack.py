"""`deadpool-run stack`: the stacks of a worker's threads."""

import os
import sys
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.runs.find import RunDir, RunId, connect_run, node_here
from deadpool_run.cli.runs.stacks import NoStackError, stacks_of
from deadpool_run.errors import RequestRefusedError


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
        here = node_here(client.run_dir, status)
    ranks = status.get("ranks", [])
    if rank is not None:
        if rank >= len(ranks):
            raise RequestRefusedError(f"there is no rank {rank}\nranks are 0 to {len(ranks) - 1}")
        if here is not None and ranks[rank]["node"] != here:
            raise RequestRefusedError(
                f"rank {rank} is on node {ranks[rank]['node']}, not on {here}\nrun this command there"
            )
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
