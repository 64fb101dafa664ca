"""`deadpool-run events`: the journal of a run, live or ended, in words."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.runs.find import AnyRunId, RunDir, find_run, run_at
from deadpool_run.cli.runs.follow import Follow, follow
from deadpool_run.text import moment


def events(
    *,
    following: Follow = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each entry of the journal, with its texts.")
    ] = False,
    run_dir: RunDir = None,
    run_id: AnyRunId = None,
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
    for path, line in follow(find, run.has_ended, wait=following):
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

        self._clock = Clock(moment(run_at(path.parent).record.get("started")))
        self._as_json = as_json
        self._is_first = True

    def lines(self, line: str) -> Iterator[str]:
        """Yield the lines for the next one of the journal."""
        from deadpool_run.cli.runs.events import entries, texts  # noqa: PLC0415 - as above

        if self._is_first:
            self._is_first = False
            self._clock.header(line)
        for entry in entries([line]):
            at, found = self._clock.time_of(entry), list(texts(entry))
            if self._as_json:
                yield json.dumps(
                    {"time": None if at is None else at.isoformat(timespec="milliseconds"), "texts": found, **entry}
                )
            else:
                clock = "-" if at is None else at.astimezone().strftime("%H:%M:%S.%f")[:12]
                yield from (f"{clock}  {text}" for text in found)
