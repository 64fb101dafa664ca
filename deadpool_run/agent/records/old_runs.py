"""The directories of runs that have ended: removed beyond the newest ones (`--keep-runs`), or set aside for a new run.

Only what deadpool-run writes is removed, and only next to a record of an ended run. A record without an end is that of a living run,
unless its process was on this machine and is gone.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from deadpool_run.agent.console import tell
from deadpool_run.agent.records.run_record import RECORD_NAME, records_of
from deadpool_run.coordinator.address import JOURNALS, POINTER_NAME, SAMPLES_NAME, SOCKET_NAME

_OURS = (
    POINTER_NAME,
    SOCKET_NAME,
    JOURNALS,
    SAMPLES_NAME,
    "script.py",
    "logs",
    "evidence",
    "meeting",
    "node-*",
    RECORD_NAME,
)
"""In the order of their removal: the record that permits it is the last."""
_FIELDS = {"schema_version", "run_id", "host", "pid", "started", "ended"}
"""Of a record that counts."""


def remove_in_background(folder: Path, keep: int) -> None:
    """Remove old runs below `folder`, in a thread that the process does not wait for."""
    threading.Thread(target=remove, args=(folder, keep), name="deadpool-old-runs", daemon=True).start()


def remove(folder: Path, keep: int) -> None:
    """Remove the runs below `folder` that have ended, except the newest `keep`."""
    try:
        ended = ended_runs(folder)
    except OSError as error:
        tell(f"old runs are not removed: {error}")
        return
    for run_dir in ended[keep:]:
        with contextlib.suppress(OSError):  # another agent removes it too
            remove_run(run_dir)


def ended_runs(folder: Path) -> list[Path]:
    """Return the directories below `folder` of runs that have ended, the newest first. Raises OSError."""
    ended: list[tuple[str, Path]] = []
    for run_dir in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another launch removes it
            if run_dir.is_dir() and not run_dir.is_symlink() and run_dir.stat().st_uid == os.getuid():
                records = _valid(run_dir)
                if records and not _lives(records):
                    ended.append((max(str(record.get("started")) for record in records), run_dir))
    return [run_dir for _, run_dir in sorted(ended, reverse=True)]


def has_ended(run_dir: Path) -> bool:
    """Return whether the records of a run say that it is over, or that its process on this machine is gone."""
    records = _valid(run_dir)
    return bool(records) and not _lives(records)


def set_aside(run_dir: Path) -> Path | None:
    """Rename the directory of a run that has ended, so that its name can be used again; return its new path.

    None if there is no such run, or if the directory has files that are not ours. Raises OSError.
    """
    if not run_dir.is_dir() or run_dir.is_symlink():
        return None
    with _locked(run_dir.parent):
        ours = {path for pattern in _OURS for path in run_dir.glob(pattern)}
        if not has_ended(run_dir) or not set(run_dir.iterdir()) <= ours or Path.cwd().is_relative_to(run_dir):
            return None
        names = (run_dir.with_name(f"{run_dir.name}~{number}") for number in count(1))
        aside = next(name for name in names if not name.exists())
        run_dir.rename(aside)
        return aside


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that of two launches with one name only one moves the earlier run."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _valid(run_dir: Path) -> list[Mapping[str, Any]]:
    return [record for record in records_of(run_dir) if record.keys() >= _FIELDS]


def _lives(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a run may not be over. What other machines do is known from its leader's record only."""
    here = socket.gethostname()
    open_ = [record for record in records if not record["ended"]]
    pids = [record["pid"] for record in open_ if record["host"] == here]
    if any(isinstance(pid, int) and Path(f"/proc/{pid}").exists() for pid in pids):
        return True
    leaders = [record for record in records if record.get("leader", True)]
    if leaders:
        last = max(leaders, key=lambda record: record.get("term") or 0)
        return not last["ended"] and last["host"] != here
    return any(record["host"] != here for record in open_)


def remove_run(run_dir: Path) -> None:
    """Remove what deadpool-run has written about a run, and its directory unless there is more in it. Raises OSError."""
    for pattern in _OURS:
        for path in run_dir.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    run_dir.rmdir()  # unless something is in it that is not ours
