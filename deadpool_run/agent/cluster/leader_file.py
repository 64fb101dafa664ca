"""The leader file: `leader.json` in the run's directory names the leader, for agents and viewers on a shared disk.

Each new leader replaces it. Where the disk is not shared the file has no use and does no harm.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from deadpool_run.agent import atomic_file
from deadpool_run.coordinator.address import POINTER_NAME


@dataclass(frozen=True, slots=True)
class LeaderFile:
    """Where the leader runs and listens."""

    term: int
    node: str
    host: str
    """The machine's own name."""
    address: str
    port: int
    run_dir: str
    """Holds the leader's control socket."""


def write(base: Path, leader: LeaderFile) -> None:
    """Write the file in the run's directory, unless one of a later term is there. Raises OSError."""
    before = read(base)
    if before is None or before.term <= leader.term:
        atomic_file.replace(base / POINTER_NAME, json.dumps(asdict(leader)))


def read(base: Path) -> LeaderFile | None:
    """Return the file's content; None if there is no file, or none that can be read."""
    try:
        found = json.loads((base / POINTER_NAME).read_text(encoding="utf-8"))
        return LeaderFile(**{**found, "term": int(found["term"]), "port": int(found["port"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
