"""Removes the directories of runs that have ended, beyond the newest ones. See `--keep-runs`.

Only what deadpool-run writes is removed, and only next to a record of an ended run. A record without an end is that of a living run,
unless its process was on this machine and is gone.
"""

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_run.agent.console import tell
from deadpool_run.agent.records.run_record import RECORD_NAME, records_of
from deadpool_run.coordinator.address import JOURNALS, POINTER_NAME, SOCKET_NAME

_OURS = (POINTER_NAME, SOCKET_NAME, JOURNALS, "script.py", "logs", "evidence", "meeting", "node-*", RECORD_NAME)
"""In the order of their removal: the record that permits it is the last."""
_FIELDS = {"schema_version", "run_id", "host", "pid", "started", "ended"}
"""Of a record that counts."""


def remove_in_background(folder: Path, keep: int) -> None:
    """Remove old runs below `folder`, in a thread that the process does not wait for."""
    threading.Thread(target=remove, args=(folder, keep), name="deadpool-old-runs", daemon=True).start()


def remove(folder: Path, keep: int) -> None:
    """Remove the runs below `folder` that have ended, except the newest `keep`."""
    ended: list[tuple[str, Path]] = []
    try:
        for run_dir in folder.iterdir():
            if run_dir.is_dir() and not run_dir.is_symlink() and run_dir.stat().st_uid == os.getuid():
                records = [record for record in records_of(run_dir) if record.keys() >= _FIELDS]
                if records and not _lives(records):
                    ended.append((max(str(record.get("started")) for record in records), run_dir))
    except OSError as error:
        tell(f"old runs are not removed: {error}")
    for _, run_dir in sorted(ended, reverse=True)[keep:]:
        with contextlib.suppress(OSError):  # another agent removes it too
            _remove(run_dir)


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


def _remove(run_dir: Path) -> None:
    for pattern in _OURS:
        for path in run_dir.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    run_dir.rmdir()  # unless something is in it that is not ours
