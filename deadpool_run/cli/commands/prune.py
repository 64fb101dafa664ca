"""`deadpool-run prune`: removes ended runs from this machine."""

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.agent.records.old_runs import ended_runs, remove_run
from deadpool_run.cli.confirm import confirmed
from deadpool_run.cli.options.machine import state_dir
from deadpool_run.cli.options.resolve import duration_s
from deadpool_run.cli.runs.find import run_at
from deadpool_run.errors import UsageError
from deadpool_run.text import counted, moment


def prune(
    *,
    keep: Annotated[int, typer.Option(metavar="N", min=0, help="Keep the newest N ended runs.")] = 0,
    older_than: Annotated[str, typer.Option(metavar="TIME", help="Only runs that ended longer ago, such as 7d.")] = "0",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask. Needed where there is no terminal.")] = False,
) -> None:
    """Remove the records and logs of runs that have ended, from the default place.

    Live runs, runs in other places (--run-dir) and durable checkpoints stay.
    """
    age_s = duration_s("--older-than", older_than, "takes all")
    folder, before = state_dir(os.environ), datetime.now(UTC) - timedelta(seconds=age_s)
    found = [path for path in (ended_runs(folder) if folder.is_dir() else [])[keep:] if _ended_before(path, before)]
    sys.stdout.writelines(f"{path}\n" for path in found)
    runs = counted(len(found), "run")
    if not found or dry_run:
        tell(f"{runs} would be removed" if found else "no ended run to remove")
        return
    if not yes and not confirmed(f"Remove {runs}, with their logs?"):
        raise UsageError(f"{runs} would be removed\nadd --yes to remove without a question")
    for path in found:
        try:
            remove_run(path)
        except OSError as error:
            tell(f"{path}: {error.strerror}: other files stay in it, or you may not remove them")


def _ended_before(path: Path, limit: datetime) -> bool:
    """Return whether a run had ended by then. A killed run has no end, so its start counts."""
    record = run_at(path).record
    ended = moment(record.get("ended") or record.get("started"))
    return ended is not None and ended <= limit
