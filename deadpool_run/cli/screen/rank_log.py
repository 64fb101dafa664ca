"""The last lines of a rank's log files."""

import os
from pathlib import Path

from deadpool_run.agent.records.run_record import RECORD_NAME
from deadpool_run.cli.runs.find import Run, node_here
from deadpool_run.text import printable
from deadpool_run.view.health import Status
from deadpool_run.wire.typed import read_object

_BYTES = 64 << 10
"""The part of a file that is read for its last lines."""
_STREAMS = ("stdout", "stderr")


def log_lines(run_dir: Path, status: Status, rank: int, most: int) -> list[str]:
    """Return up to `most` lines: the end of each stream below its name, or why there is none. `run_dir`: that of the agent here."""
    entry: Status = next((entry for entry in status.get("ranks", ()) if entry["rank"] == rank), {})
    local_rank, here = entry.get("local_rank", rank), node_here(run_dir, status)
    if here not in (None, entry.get("node")):
        return [
            f"rank {rank} is on node {entry.get('node')}, not on {here}",
            f"run `deadpool-run logs {local_rank}` there",
        ]
    root = Run(run_dir, read_object(run_dir / RECORD_NAME)).log_dir
    attempt = f"attempt_{int(status.get('generation') or 0)}"
    paths = [] if root is None else [root / attempt / str(local_rank) / f"{name}.log" for name in _STREAMS]
    found = [path for path in paths if path.is_file()]
    if not found:
        return [
            f"rank {rank} has no log files: its output goes to the console of the run",
            "start the run with --tee 3 to have it in files as well",
        ]
    shares = _shares([_tail(path) for path in found], most - len(found))
    return [
        line
        for path, lines in zip(found, shares, strict=True)
        for line in (f"--- {path.relative_to(path.parents[2])}", *lines)
    ][:most]


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _BYTES))
            lines = file.read(_BYTES).splitlines()
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    return [printable(line.decode(errors="replace")) for line in (lines[1:] if size > _BYTES else lines)]


def _shares(parts: list[list[str]], room: int) -> list[list[str]]:
    """Return the ends of the parts that fit together: a short part leaves its room to the others."""
    shares: list[list[str]] = [[] for _ in parts]
    left, room = len(parts), max(0, room)
    for at in sorted(range(len(parts)), key=lambda at: len(parts[at])):
        count = min(len(parts[at]), room // left)
        shares[at] = parts[at][len(parts[at]) - count :]
        left, room = left - 1, room - count
    return shares
