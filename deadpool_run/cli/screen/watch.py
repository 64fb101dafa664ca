"""Showing a run's status once, or until the run ends."""

import os
import sys
import time
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deadpool_run.cli.runs.client import ControlClient
from deadpool_run.cli.screen.records import RunRecords
from deadpool_run.view.health import EXIT_CODES, health
from deadpool_run.view.pace import Pace, completed
from deadpool_run.view.render import PLAIN_WIDTH, to_json, to_plain, to_rich

EVERY_S = 1.0
_RECORDS_S = 0.5
"""Time limit for the disk with the run's records."""
_USUAL_WIDTH = 80
"""For a terminal that does not know its own."""


def show_once(run: ControlClient, *, as_json: bool) -> int:
    """Write one status to stdout, and return the exit code for the run's health."""
    status, pace = run.ask({"do": "status"}), Pace()
    if not as_json:
        with RunRecords(run.run_dir) as records:
            records.wait(_RECORDS_S)
            pace.recorded = records.of(status).steps_per_s
    sys.stdout.write(_text(status, pace, as_json=as_json))
    return EXIT_CODES[health(status)]


def follow(run: ControlClient, *, as_json: bool) -> int:
    """Write each status to stdout until the run ends."""
    code, pace = 0, Pace()
    with RunRecords(run.run_dir) as records:
        for status in run.watch(EVERY_S):
            pace.recorded = records.of(status).steps_per_s
            pace.note(completed(status), time.monotonic())
            sys.stdout.write(_text(status, pace, as_json=as_json) + ("" if as_json else "\n"))
            sys.stdout.flush()
            code = EXIT_CODES[health(status)]
    return code


def follow_live(run: ControlClient, console: Console) -> int:
    """Keep a table on the terminal up to date until the run ends or the user presses Ctrl-C."""
    code, pace = 0, Pace()
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        try:
            for status in run.watch(EVERY_S):
                pace.note(completed(status), time.monotonic())
                live.update(to_rich(status, _now(), console.width, pace.per_s()), refresh=True)
                code = EXIT_CODES[health(status)]
        except KeyboardInterrupt:
            return code
    console.print(Text("the run has ended"))
    return code


def _text(status: dict[str, Any], pace: Pace, *, as_json: bool) -> str:
    return to_json(status, _now()) + "\n" if as_json else to_plain(status, _now(), _width(), pace.per_s())


def _width() -> int:
    """Return the columns of the terminal at stdout; `PLAIN_WIDTH` without one."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL_WIDTH
    except OSError:  # a pipe or a file
        return PLAIN_WIDTH


def _now() -> datetime:
    return datetime.now(UTC)
