"""`deadpool-run status` and `deadpool-run kill-rank`: the commands for a live run."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.options.machine import state_dir
from deadpool_run.core.injection import KillHow
from deadpool_run.errors import NoSuchRunError
from deadpool_run.view.client import ControlClient, connect
from deadpool_run.view.health import ready_spares

RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="The run's directory. Default: $DEADPOOL_RUN_DIR, else the newest live run."
    ),
]


def _find_run(run_dir: Path | None) -> ControlClient:
    """Connect to the named run, else to $DEADPOOL_RUN_DIR, else to the newest live run. Raises `NoSuchRunError`."""
    inherited = os.environ.get("DEADPOOL_RUN_DIR")
    return connect(run_dir or (Path(inherited) if inherited else None), state_dir(os.environ))


def status(
    *,
    run_dir: RunDir = None,
    once: Annotated[bool, typer.Option("--once", help="Print the status once, also on a terminal.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print the status after each change until the run ends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with --watch, one per line.")] = False,
    slurm_job: Annotated[
        str | None, typer.Option("--slurm-job", metavar="ID", help="Ask from a node of this Slurm job.")
    ] = None,
) -> None:
    """Show a live run: its ranks, spares and last repairs. On a terminal it is a live table.

    Exit codes: 0 healthy or starting; 3 unprotected, recovering, ending or short of spares; 4 no such run.
    """
    chosen = {"--once": once, "--watch": watch, "--json": as_json}
    words = tuple(word for word, given in chosen.items() if given)
    if slurm_job is not None:
        raise typer.Exit(_through_slurm(slurm_job, words, run_dir))
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    try:
        found = _find_run(run_dir)
    except NoSuchRunError:
        from deadpool_run.cli.cluster.slurm_status import job_of  # noqa: PLC0415 - seldom needed

        job = job_of(run_dir, os.environ)
        if job is None:
            raise
        raise typer.Exit(_through_slurm(job, words, run_dir)) from None
    with found as run:
        from deadpool_run.view import watch as view  # noqa: PLC0415 - help does not need rich

        if terminal and not once and not as_json:
            from rich.console import Console  # noqa: PLC0415 - as above

            raise typer.Exit(view.follow_live(run, Console()))
        show = view.follow if watch and not once else view.show_once
        raise typer.Exit(show(run, as_json=as_json))


def _through_slurm(job: str, words: tuple[str, ...], run_dir: Path | None) -> int:
    from deadpool_run.cli.cluster.slurm_status import run_dir_of, status_through_slurm  # noqa: PLC0415 - seldom needed

    place = run_dir or run_dir_of(job, os.environ)
    return status_through_slurm(job, (*words, *(() if place is None else ("--run-dir", str(place.absolute())))))


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
    with _find_run(run_dir) as run:
        if not ready_spares(run.ask({"do": "status"})):
            tell("no spare is ready: the rank will be started again")
        if sys.stdin.isatty() and sys.stderr.isatty() and not yes:
            typer.confirm(f"Kill rank {rank} of {run.run_dir.name} with {how}?", abort=True, err=True)
        done = run.ask({"do": "kill-rank", "rank": rank, "how": how.value})
    fate = "was told to exit" if how is KillHow.EXIT else f"was sent {how.name}"
    sys.stdout.write(f"rank {done['rank']}: worker {done['worker']} (pid {done['pid']}) {fate}\n")
