"""Outcome of a run, read from the records of its agents."""

import json
from pathlib import Path
from typing import Any

from deadpool_run.agent.records.run_record import RECORD_NAME

_PLACES = (RECORD_NAME, f"*/{RECORD_NAME}", f"*/*/{RECORD_NAME}")
"""The run's directory, and its nodes' directories below it."""


def outcome(run_dir: Path) -> int | None:
    """Return the exit code of a run that has ended; None if no readable record has it.

    Of several agents' records the one with the largest term counts: an agent that was cut off knows only its own end.
    """
    ended = [record for record in _records(run_dir) if record.get("ended") and isinstance(record.get("exit_code"), int)]
    last = max(ended, key=lambda record: (bool(record.get("leader", True)), record.get("term") or 0), default=None)
    return None if last is None else int(last["exit_code"])


def _records(run_dir: Path) -> list[dict[str, Any]]:
    found = []
    for place in _PLACES:
        for path in run_dir.glob(place):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # another user's, or cut short when its node failed
            if isinstance(record, dict):
                found.append(record)
    return found
