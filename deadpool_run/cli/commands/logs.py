"""`deadpool-run logs`: the log files of a run, live or ended."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from deadpool_run.agent.console import tell
from deadpool_run.cli.runs.find import AnyRunId, Run, RunDir, find_run
from deadpool_run.cli.runs.follow import Follow, follow
from deadpool_run.errors import NoSuchRunError, RequestRefusedError
from deadpool_run.view.health import ranks_per_node

_LOG = re.compile(r"attempt_([0-9]+)/([0-9]+)/(stdout|stderr)\.log")
_STREAMS = {"out": ("stdout",), "err": ("stderr",), "both": ("stdout", "stderr")}


def logs(
    rank: Annotated[
        int | None,
        typer.Argument(metavar="[RANK]", min=0, show_default=False, help="Only the logs of this local rank."),
    ] = None,
    *,
    following: Follow = False,
    stream: Annotated[
        str, typer.Option(metavar="out|err|both", autocompletion=lambda: [*_STREAMS], help="The streams to show.")
    ] = "both",
    run_dir: RunDir = None,
    run_id: AnyRunId = None,
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

    if rank is not None and rank not in (known := _local_ranks(run, root)):
        raise RequestRefusedError(
            f"run {run.name} has no local rank {rank} on this machine\nits local ranks are {', '.join(map(str, known))}"
        )

    def find() -> list[Path]:
        return [path for _, path in sorted(_log_files(root, rank, _STREAMS[stream]))]

    if not find() and not following:
        tell(f"no log files in {root}: output went to the console\n  start the run with --tee 3 to have both")
    for path, line in follow(find, run.has_ended, wait=following):
        attempt, local_rank = path.parts[-3].removeprefix("attempt_"), path.parts[-2]
        again = f"{attempt}:" if attempt != "0" else ""
        prefix = f"[{again}{local_rank} {path.stem}] " if rank is None or stream == "both" else ""
        sys.stdout.write(f"{prefix}{line}\n")
        if following:
            sys.stdout.flush()


def _local_ranks(run: Run, root: Path) -> list[int]:
    """Return the local ranks that began here, and those that came later and have files."""
    began = range(ranks_per_node({"run": run.record}))
    return sorted({*began, *(local_rank for (_, local_rank, _), _ in _log_files(root, None, _STREAMS["both"]))})


def _log_files(root: Path, rank: int | None, streams: tuple[str, ...]) -> Iterator[tuple[tuple[int, int, str], Path]]:
    for path in root.glob("attempt_*/*/std*.log"):
        match = _LOG.fullmatch(str(path.relative_to(root)))
        if match and match[3] in streams and (rank is None or int(match[2]) == rank):
            yield (int(match[1]), int(match[2]), match[3]), path
