"""`deadpool-run ls`: the runs of this machine."""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.runs.client import ControlClient
from deadpool_run.cli.runs.find import Run, RunState, all_runs
from deadpool_run.errors import NoSuchRunError
from deadpool_run.text import age, printable

_COLUMNS = ("run", "state", "started", "ranks", "step", "end")
_WIDTH = 100


def ls(
    *,
    last: Annotated[int, typer.Option("-n", "--last", metavar="N", min=1, help="Show the newest N runs.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each run.")] = False,
) -> None:
    """List the runs of this user on this machine, live and ended, the newest first.

    Runs that were started with --run-dir are not listed.
    """
    now, runs = datetime.now(UTC), all_runs(os.environ)
    shown = [(run, _status(run)) for run in runs[:last]]
    if as_json:
        sys.stdout.write("".join(json.dumps(_object(run, status)) + "\n" for run, status in shown))
        return
    rows = [[name.upper() for name in _COLUMNS], *(_row(run, status, now) for run, status in shown)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")
    if more := len(runs) - len(shown):
        tell(f"{more} older run{'s are' if more > 1 else ' is'} not shown: add --last {len(runs)}")


def _status(run: Run) -> Mapping[str, Any]:
    """Return the status of a live run; empty if it does not answer."""
    if run.state is RunState.LIVE:
        with contextlib.suppress(NoSuchRunError), ControlClient(run.path) as client:
            return client.ask({"do": "status"})
    return {}


def _object(run: Run, status: Mapping[str, Any]) -> dict[str, Any]:
    step = max((rank.get("step") or 0 for rank in status.get("ranks", ())), default=None)
    names = ("run_id", "started", "ended", "exit_code", "reason", "world_size", "host", "command")
    log_dir = None if run.log_dir is None else str(run.log_dir)
    return {
        "name": run.name,
        "state": run.state.value,
        "phase": status.get("phase"),
        "step": step,
        **{name: run.record.get(name) for name in names},
        "run_dir": str(run.path),
        "log_dir": log_dir,
    }


def _row(run: Run, status: Mapping[str, Any], now: datetime) -> list[str]:
    found = _object(run, status)
    code = found["exit_code"]
    match run.state:
        case RunState.ENDED:
            state = "done" if code == 0 else f"exit code {code}"
            end = f"{age(found['ended'], now)} ago: {run.why}"
        case RunState.KILLED:
            state, end = "killed", f"the agent (pid {run.record.get('pid')}) is gone"
        case RunState.ELSEWHERE:
            state, end = f"on {found['host']}", ""
        case RunState.LIVE:
            state, end = str(found["phase"] or run.state), ""
    cells = (
        run.name,
        state,
        f"{age(found['started'], now)} ago",
        found["world_size"],
        "" if found["step"] is None else found["step"],
        end if len(end) <= _WIDTH else f"{end[: _WIDTH - 3]}...",
    )
    return [printable(cell) for cell in cells]
