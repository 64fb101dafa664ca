"""An earlier run that may still live on other machines, as far as this machine's disk knows.

A machine that restarts would found a second job beside it. The records and journals of the run name agents that may know better.
"""

import contextlib
import mmap
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_run.agent.records.run_record import endpoints_of, records_of
from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.coordinator.address import JOURNALS
from deadpool_run.text import shortened

_ADDRESS = re.compile(rb'"address":"([^"\\]+)","port":(\d{1,5})\b')
"""Of an agent, in a journal: events that nodes joined, and states that begin with them."""
_MOST = 5
"""The newest agents that a machine asks."""


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run without an end."""

    run_dir: Path
    run_id: str
    started: str
    agents: Sequence[tuple[str, int]]
    """Addresses and ports of its agents, the leader first."""

    @property
    def refusal(self) -> str:
        """Why no other run is founded, and what to do."""
        asked = shortened([f"{address}:{port}" for address, port in self.agents], _MOST)
        return (
            f"{self.run_dir} holds run {self.run_id}, started {self.started}, which has no end on record and may still run: "
            f"of its agents ({asked}), none answers, and one neither answers nor refuses\n"
            "if it still runs, start this machine with --rdzv-endpoint HOST:PORT of a machine that `deadpool-run status` lists "
            f"there; if it is over, remove the directory (rm -r {shlex.quote(str(self.run_dir))}) and start again"
        )


def find(spec: LaunchSpec) -> EarlierRun | None:
    """Return the newest run that this launch would found again; None if all have ended. Reads the disk."""
    found = [(record, run_dir) for run_dir in _candidates(spec) for record in _without_end(run_dir)]
    same = [(record, run_dir) for record, run_dir in found if run_dir == spec.run_dir or _is_same(record, spec)]
    if not same:
        return None
    record, run_dir = max(same, key=lambda each: str(each[0].get("started")))
    return EarlierRun(run_dir, str(record.get("run_id")), str(record.get("started")), _agents(run_dir))


def _candidates(spec: LaunchSpec) -> Iterator[Path]:
    """Yield the run's own directory, and its neighbours: without a name for the run, each launch has a new directory."""
    yield spec.run_dir
    if spec.cluster is not None and not spec.cluster.own_directory:
        with contextlib.suppress(OSError):
            yield from (path for path in spec.run_dir.parent.iterdir() if path.is_dir() and path != spec.run_dir)


def _without_end(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run of several machines, if none of its agents has seen its end."""
    records = [record for record in records_of(run_dir) if "run_id" in record]
    return [] if any(record.get("over", record.get("ended")) for record in records) else records


def _is_same(record: dict[str, Any], spec: LaunchSpec) -> bool:
    named_otherwise = spec.named and record["run_id"] != spec.run_id
    return (
        not named_otherwise
        and record.get("endpoints") == endpoints_of(spec)
        and record.get("command") == list(spec.target.argv)
    )


def _agents(run_dir: Path) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for journal in (*run_dir.glob(JOURNALS), *run_dir.glob(f"*/{JOURNALS}")):
        with (
            contextlib.suppress(OSError, ValueError),  # empty, or gone
            journal.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            found += ((match[1].decode(), int(match[2])) for match in _ADDRESS.finditer(content))
    if (leader := leader_file.read(run_dir)) is not None:
        found.append((leader.address, leader.port))
    return list(dict.fromkeys(reversed(found)))[:_MOST]
