"""Finds runs by directory or name, among the live and the ended ones of this user."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from deadpool_run.agent.records.old_runs import has_ended
from deadpool_run.agent.records.run_record import last_leaders, records_of
from deadpool_run.cli.options.machine import state_dir
from deadpool_run.cli.runs.client import ControlClient, connect
from deadpool_run.errors import NoSuchRunError, UsageError
from deadpool_run.text import age, printable

_SHOWN = 5
_OUTPUT_FILES = ("attempt_*/*/std*.log", "attempt_*/*/error.json")
"""Files of the output of workers, in a run's folder of logs."""


def run_names() -> list[str]:
    """Return the names of the runs in the default place, for a shell that completes them."""
    return [run.name for run in all_runs(os.environ)]


RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", metavar="DIR", help="The run's directory. Default: $DEADPOOL_RUN_DIR."),
]
_run_id = partial(typer.Option, "--run-id", metavar="NAME", autocompletion=run_names)
RunId = Annotated[str | None, _run_id(help="The run's name. Default: the only live run.")]
AnyRunId = Annotated[str | None, _run_id(help="The run's name. Default: the only live run, else the last one.")]
"""Of a command for live and ended runs."""


class RunState(StrEnum):
    """The state of a run according to its records."""

    LIVE = "live"
    ENDED = "ended"
    KILLED = "killed"
    """Its agent is gone, and has not written the end."""
    ELSEWHERE = "elsewhere"
    """Its agent is on another machine, and has not written the end."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's directory, and the record of its last leader; empty without one that can be read."""

    path: Path
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The directory's name, which is unique."""
        return self.path.name

    @property
    def state(self) -> RunState:
        """The state, from the records. A live run may still have lost its agents on other machines."""
        if self.record.get("ended"):
            return RunState.ENDED
        if has_ended(self.path):
            return RunState.KILLED
        return RunState.LIVE if self.record.get("host") == socket.gethostname() else RunState.ELSEWHERE

    def has_ended(self) -> bool:
        """Return whether the run has ended by now: reads its records again."""
        return run_at(self.path).state in {RunState.ENDED, RunState.KILLED}

    @property
    def log_dir(self) -> Path | None:
        """The logs. They have moved if the directory has."""
        written, place = self.record.get("log_dir"), self.record.get("run_dir")
        if not isinstance(written, str):
            return None
        inside = isinstance(place, str) and Path(written).is_relative_to(place)
        return self.path / Path(written).relative_to(str(place)) if inside else Path(written)

    @property
    def why(self) -> str:
        """Why it ended, on one line; empty if that is not recorded."""
        return printable(self.record.get("reason") or "")

    def end(self, now: datetime) -> str:
        """Return when and why the run ended, in words; empty if it has not."""
        match self.state:
            case RunState.ENDED:
                ago = age(self.record.get("ended"), now)
                return f"ended {ago} ago with exit code {self.record.get('exit_code')}" + (
                    f": {self.why}" if self.why else ""
                )
            case RunState.KILLED:
                return f"was killed: its agent (pid {self.record.get('pid')}) is gone"
            case _:
                return ""


def run_at(path: Path) -> Run:
    """Return the run of this directory. Its record is that of the last leader."""
    return Run(path, last_leaders(records_of(path)))


def node_here(run_dir: Path, status: Mapping[str, Any]) -> str | None:
    """Return the node of the agent that has this run directory; None in a run of one machine."""
    leader = status.get("coordinator")
    if not leader:
        return None
    name = run_dir.name
    return name.removeprefix("node-") if name.startswith("node-") else str(leader.get("node"))


def all_runs(environment: Mapping[str, str]) -> list[Run]:
    """Return the runs in the default place, the newest first."""
    folder = state_dir(environment)
    found = [run_at(path) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted((run for run in found if run.record), key=lambda run: str(run.record.get("started")), reverse=True)


def find_run(run_dir: Path | None, run_id: str | None, environment: Mapping[str, str]) -> Run:
    """Return the named run, else that of $DEADPOOL_RUN_DIR, else the only live one, else the one that started last.

    Raises `NoSuchRunError`, and `UsageError` if several are live.
    """
    path = named_dir(run_dir, run_id, environment)
    if path is not None:
        run = run_at(path)
        if not run.record:
            raise NoSuchRunError(f"{path}: no record of a run\n`deadpool-run ls` lists the runs of this machine")
        return run
    runs = all_runs(environment)
    live = [run for run in runs if run.state is RunState.LIVE]
    if len(live) > 1:
        names = ", ".join(run.name for run in live[:_SHOWN])
        raise UsageError(f"{len(live)} runs are live: {names}\nchoose one with --run-id")
    if not runs:
        raise NoSuchRunError(
            f"no run below {state_dir(environment)}\nif it was started with --run-dir, add the same option here"
        )
    return (live or runs)[0]


def connect_run(run_dir: Path | None, run_id: str | None, environment: Mapping[str, str]) -> ControlClient:
    """Connect to the named run, else to that of $DEADPOOL_RUN_DIR, else to the only live one.

    Raises `NoSuchRunError`, which says how an ended run ended, and `UsageError` if several are live.
    """
    path = named_dir(run_dir, run_id, environment)
    try:
        return connect(path, state_dir(environment))
    except NoSuchRunError as error:
        run = run_at(path) if path is not None else next(iter(all_runs(environment)), None)
        end = "" if run is None else run.end(datetime.now(UTC))
        if run is None or not end:
            raise
        has_output = run.log_dir is not None and any(any(run.log_dir.glob(files)) for files in _OUTPUT_FILES)
        files = f"logs are in {run.log_dir}" if has_output else f"records are in {run.path}"
        others = f"its {files}; `deadpool-run ls` lists the runs of this machine"
        if path is None:
            raise NoSuchRunError(
                f"{str(error).partition(chr(10))[0]}\nthe last one, {run.name}, {end}\n{others}"
            ) from error
        raise NoSuchRunError(f"run {run.name} {end}\n{others}") from error


def named_dir(run_dir: Path | None, run_id: str | None, environment: Mapping[str, str]) -> Path | None:
    """Return the directory of the run that the options name, else $DEADPOOL_RUN_DIR; None without any.

    A name that several runs had means the live one, else the newest. Raises `NoSuchRunError`.
    """
    if run_dir is not None:
        if run_id is not None:
            raise UsageError("--run-dir and --run-id exclude each other\nremove one of them")
        return run_dir
    if run_id is None:
        inherited = environment.get("DEADPOOL_RUN_DIR")
        return Path(inherited) if inherited else None
    runs = all_runs(environment)
    fitting = [run for run in runs if run_id in (run.name, run.record.get("run_id"))]
    exact = [run for run in fitting if run.name == run_id]
    live = [run for run in fitting if run.state is RunState.LIVE]
    if not fitting:
        raise NoSuchRunError(
            f"no run {run_id!r} below {state_dir(environment)}\n`deadpool-run ls` lists the runs of this machine"
        )
    return (live or exact or fitting)[0].path
