"""`deadpool-run report`: a page with charts of a run, live or ended."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.runs.find import AnyRunId, RunDir, find_run, run_names
from deadpool_run.errors import UsageError


def report(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            autocompletion=run_names,
            show_default=False,
            help="The run's name, or its directory.",
        ),
    ] = None,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    trace_file: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Also write a trace for Perfetto (ui.perfetto.dev).")
    ] = None,
    run_dir: RunDir = None,
    run_id: AnyRunId = None,
) -> None:
    """Write a page with charts of a run, live or ended: step times, repairs, ranks, goodput, snapshots and incidents.

    The page is one file that loads nothing. On several machines it has what this machine knows: run it where the leader was.
    """
    from deadpool_run.cli.report.history import read_history  # noqa: PLC0415 - a launch does without the core until then
    from deadpool_run.cli.report.page import page  # noqa: PLC0415 - as above
    from deadpool_run.cli.report.trace import trace  # noqa: PLC0415 - as above

    if run is not None and (run_dir is not None or run_id is not None):
        raise UsageError("RUN excludes --run-dir and --run-id\nremove one of them")
    if run is not None:
        run_dir, run_id = (Path(run), None) if Path(run).is_dir() else (None, run)
    found = find_run(run_dir, run_id, os.environ)
    history = read_history(found)
    _write(output, page(history))
    if trace_file is not None:
        _write(trace_file, json.dumps(trace(history), separators=(",", ":")))
    if not history.samples:
        tell("the run has no samples of its progress: the page has no step times")
    sys.stdout.write("".join(f"{path}\n" for path in (output, trace_file) if path is not None))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}\nname another file") from error
