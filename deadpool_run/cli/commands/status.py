"""`deadpool-run status`: shows a live run."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.cli.runs.find import RunDir, RunId, connect_run, named_dir, run_at
from deadpool_run.errors import NoSuchRunError


def status(  # noqa: PLR0913 - one parameter for each option
    *,
    run_dir: RunDir = None,
    run_id: RunId = None,
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

    Exit codes: 0 healthy or starting; 3 unprotected, recovering, ending or short of spares; 4 no such live run.
    """
    chosen = {"--once": once, "--watch": watch, "--json": as_json}
    words = tuple(word for word, given in chosen.items() if given)
    if slurm_job is not None:
        raise typer.Exit(_through_slurm(slurm_job, words, run_dir))
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    run_dir = named_dir(run_dir, run_id, os.environ)
    try:
        found = connect_run(run_dir, None, os.environ)
    except NoSuchRunError:
        from deadpool_run.cli.cluster.slurm_status import job_of  # noqa: PLC0415 - seldom needed

        job = job_of(run_dir, os.environ)
        if job is None:
            if as_json and run_dir is not None and (ended := run_at(run_dir)).record:
                sys.stdout.write(json.dumps({"schema_version": 1, "health": ended.state, "run": ended.record}) + "\n")
            raise
        raise typer.Exit(_through_slurm(job, words, run_dir)) from None
    with found as run:
        from deadpool_run.cli.screen import watch as view  # noqa: PLC0415 - help does not need rich

        if terminal and not once and not as_json:
            from rich.console import Console  # noqa: PLC0415 - as above

            if sys.stdin.isatty():
                from deadpool_run.cli.screen.viewer import show_screen  # noqa: PLC0415 - as above

                raise typer.Exit(show_screen(run, Console(), sys.stdin.fileno()))
            raise typer.Exit(view.follow_live(run, Console()))
        show = view.follow if watch and not once else view.show_once
        raise typer.Exit(show(run, as_json=as_json))


def _through_slurm(job: str, words: tuple[str, ...], run_dir: Path | None) -> int:
    from deadpool_run.cli.cluster.slurm_status import run_dir_of, status_through_slurm  # noqa: PLC0415 - seldom needed

    place = run_dir or run_dir_of(job, os.environ)
    return status_through_slurm(job, (*words, *(() if place is None else ("--run-dir", str(place.absolute())))))
