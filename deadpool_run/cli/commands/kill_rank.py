"""`deadpool-run kill-rank`: kill a rank, to see it replaced."""

import os
import sys
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.commands.find import RunDir, find_run
from deadpool_run.core.injection import KillHow
from deadpool_run.view.health import ready_spares


def kill_rank(
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="The rank to kill.", show_default=False)],
    *,
    how: Annotated[
        KillHow, typer.Option("--how", help="Signal to send. exit: the process ends itself with code 1.")
    ] = KillHow.SIGKILL,
    run_dir: RunDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask, even on a terminal.")] = False,
) -> None:
    """Kill a rank's process in a live run, to see it replaced. The run records the loss as injected."""
    with find_run(run_dir, os.environ) as run:
        status = run.ask({"do": "status"})
        if not ready_spares(status):
            tell("no spare is ready: the rank will be started again")
        if sys.stdin.isatty() and sys.stderr.isatty() and not yes:
            typer.confirm(f"Kill rank {rank} of {run.run_dir.name} with {how}?", abort=True, err=True)
        done = run.ask({"do": "kill-rank", "rank": rank, "how": how.value})
    fate = "was told to exit" if how is KillHow.EXIT else f"was sent {how.name}"
    sys.stdout.write(f"rank {done['rank']}: worker {done['worker']} (pid {done['pid']}) {fate}\n")
