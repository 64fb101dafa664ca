"""`deadpool-run logs` and `deadpool-run events`: log files and journal of a run, live or ended."""

import json
import os
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.runs.find import Run, RunDir, RunId, RunState, find_run, run_at
from deadpool_run.cli.runs.follow import follow
from deadpool_run.errors import NoSuchRunError

Follow = Annotated[bool, typer.Option("-f", "--follow", help="Continue until the run ends.")]
_LOG = re.compile(r"attempt_([0-9]+)/([0-9]+)/(stdout|stderr)\.log")
_STREAMS = {"out": ("stdout",), "err": ("stderr",), "both": ("stdout", "stderr")}


def logs(
    rank: Annotated[
        int | None,
        typer.Argument(metavar="[RANK]", min=0, show_default=False, help="Only the logs of this local rank."),
    ] = None,
    *,
    following: Follow = False,
    stream: Annotated[str, typer.Option(metavar="out|err|both", help="The streams to show.")] = "both",
    run_dir: RunDir = None,
    run_id: RunId = None,
) -> None:
    """Show the log files of all workers that had a rank. Lines of several files have a prefix.

    Output is in files if the run was started with --tee or --redirects. On several machines a rank is a local one, of this
    machine.
    """
    if stream not in _STREAMS:
        raise typer.BadParameter(f"{stream!r} is not out, err or both")
    run = find_run(run_dir, run_id, os.environ)
    root = run.log_dir
    if root is None:
        raise NoSuchRunError(
            f"run {run.name} has no log files (log directory /dev/null)\nstart it with another --log-dir, and --tee 3"
        )
    if not root.is_dir():
        raise NoSuchRunError(
            f"run {run.name} has no log files on this machine (log directory {root})\n"
            "run this on the machine of the rank, or start the run with --tee 3"
        )

    def find() -> list[Path]:
        return [path for _, path in sorted(_log_files(root, rank, _STREAMS[stream]))]

    if not find() and not following:
        tell(f"no log files in {root}: output went to the console\n  start the run with --tee 3 to have both")
    for path, line in follow(find, lambda: _has_ended(run), wait=following):
        attempt, local_rank = path.parts[-3].removeprefix("attempt_"), path.parts[-2]
        again = f"{attempt}:" if attempt != "0" else ""
        prefix = f"[{again}{local_rank} {path.stem}] " if rank is None or stream == "both" else ""
        sys.stdout.write(f"{prefix}{line}\n")
        if following:
            sys.stdout.flush()


def events(
    *,
    following: Follow = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each entry of the journal, with its texts.")
    ] = False,
    run_dir: RunDir = None,
    run_id: RunId = None,
) -> None:
    """Show the events and decisions of a run: its journal, in words.

    Times are local, and derived from the start of the run. On several machines the journals of all leaders are shown, as far
    as they are on this machine.
    """
    from deadpool_run.cli.runs.events import journals_of, no_journal  # noqa: PLC0415 - a launch does without the core until then

    run = find_run(run_dir, run_id, os.environ)

    def find() -> list[Path]:
        return journals_of(run.path)

    if not find() and not following:
        raise no_journal(run.path)
    journals: dict[Path, _Journal] = {}
    shown: Path | None = None
    for path, line in follow(find, lambda: _has_ended(run), wait=following):
        if path != shown and len(find()) > 1:
            tell(str(path))
        shown = path
        for text in journals.setdefault(path, _Journal(path, as_json=as_json)).lines(line):
            sys.stdout.write(f"{text}\n")
        if following:
            sys.stdout.flush()


class _Journal:
    """A leader's journal, as printed lines."""

    def __init__(self, path: Path, *, as_json: bool) -> None:
        from deadpool_run.cli.runs.events import Clock  # noqa: PLC0415 - a launch does without the core until then

        self._clock = Clock(_started(path))
        self._as_json = as_json

    def lines(self, line: str) -> Iterator[str]:
        """Yield the lines for the next one of the journal."""
        from deadpool_run.cli.runs.events import entries, texts  # noqa: PLC0415 - as above

        for entry in entries([line]):
            at, found = self._clock.time_of(entry), list(texts(entry))
            if self._as_json:
                yield json.dumps(
                    {"time": None if at is None else at.isoformat(timespec="milliseconds"), "texts": found, **entry}
                )
            else:
                clock = "-" if at is None else at.astimezone().strftime("%H:%M:%S.%f")[:12]
                yield from (f"{clock}  {text}" for text in found)


def _started(journal: Path) -> datetime | None:
    try:
        return datetime.fromisoformat(str(run_at(journal.parent).record.get("started")))
    except ValueError:
        return None


def _has_ended(run: Run) -> bool:
    return run_at(run.path).state in {RunState.ENDED, RunState.KILLED}


def _log_files(root: Path, rank: int | None, streams: tuple[str, ...]) -> Iterator[tuple[tuple[int, int, str], Path]]:
    for path in root.glob("attempt_*/*/std*.log"):
        match = _LOG.fullmatch(str(path.relative_to(root)))
        if match and match[3] in streams and (rank is None or int(match[2]) == rank):
            yield (int(match[1]), int(match[2]), match[3]), path
