"""Where a run is led from: `leader.json` in the run's directory, for agents and viewers that look there on a shared disk.

The last that took over writes last. Where the disk is not shared the file is of no use, and of no harm.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from deadpool_run.coordinator.address import POINTER_NAME


@dataclass(frozen=True, slots=True)
class LeaderFile:
    """Of the coordinator's agent."""

    term: int
    node: str
    host: str
    """The machine's own name."""
    address: str
    port: int
    run_dir: str
    """With its control socket."""


def write(base: Path, told: LeaderFile) -> None:
    """Say it in the run's directory, unless another says it of a later term. Raises OSError."""
    before = read(base)
    if before is not None and before.term > told.term:
        return
    fresh = base / f".{POINTER_NAME}.{os.getpid()}"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor, opened with its mode
        json.dump(asdict(told), file)
    fresh.replace(base / POINTER_NAME)


def read(base: Path) -> LeaderFile | None:
    """Return what is said there; None if nothing is, or nothing that can be understood."""
    try:
        told = json.loads((base / POINTER_NAME).read_text(encoding="utf-8"))
        return LeaderFile(**{**told, "term": int(told["term"]), "port": int(told["port"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
