"""`deadpool-run wait`: waits for the end of a run."""

import contextlib
import os
import select
import socket
import sys
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.options.resolve import duration_s
from deadpool_run.cli.runs.find import AnyRunId, Run, RunDir, RunState, find_run, run_at
from deadpool_run.errors import NoSuchRunError

_TIMED_OUT = 124
"""The exit code of timeout(1)."""
_UNKNOWN = 1


def wait(
    *,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Give up after this long, with exit code 124.")] = "",
    run_dir: RunDir = None,
    run_id: AnyRunId = None,
) -> None:
    """Wait until a run has ended, and exit with its exit code: at once, if it has ended already."""
    timeout_s = duration_s("--timeout", timeout, "does not wait") if timeout else None
    run = find_run(run_dir, run_id, os.environ)
    if not wait_for(run, timeout_s):
        tell(f"run {run.name} has not ended within {timeout}")
        raise typer.Exit(_TIMED_OUT)
    record = run_at(run.path).record
    if record.get("ended") is None:
        tell(f"run {run.name} was killed: its exit code is not known")
        raise typer.Exit(_UNKNOWN)
    sys.stdout.write(f"run {run.name} ended with exit code {record['exit_code']}: {run_at(run.path).why}\n")
    raise typer.Exit(int(record["exit_code"]))


def wait_for(run: Run, timeout_s: float | None) -> bool:
    """Wait until the run's agent has ended; return whether it has."""
    if run.state is RunState.ELSEWHERE:
        raise NoSuchRunError(
            f"run {run.name} is led by a process on {run.record.get('host')}, not on {socket.gethostname()}\n"
            "run this command there"
        )
    if run.state is not RunState.LIVE:
        return True
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(run.record["pid"]))
        try:
            return bool(select.select([handle], [], [], timeout_s)[0])
        finally:
            os.close(handle)
    return True
