"""The record of a run, `run.json`, mode 0600: its command, place and end. Written at its start and at its end."""

import json
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deadpool_run.agent import atomic_file
from deadpool_run.agent.console import tell
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.coordinator.address import JOURNALS, SOCKET_NAME
from deadpool_run.coordinator.sink import Sink
from deadpool_run.errors import ProtocolError, UsageError
from deadpool_run.wire.typed import read_object

RECORD_NAME = "run.json"
SCHEMA_VERSION = 1
_GRACE_S = 10.0
"""At the end: how long the disk may take."""
_PLACES = (RECORD_NAME, f"*/{RECORD_NAME}", f"*/*/{RECORD_NAME}")
"""The run's directory, and its nodes' directories below it."""


def make_run_dir(run_dir: Path) -> None:
    """Make a run's directory, mode 0700. Raises `UsageError` if that fails, or if it holds another run.

    One that exists keeps its mode: with `--run-dir` it may be the user's.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"run directory {run_dir}: {error.strerror}\nchoose another with --run-dir") from error
    if (run_dir / RECORD_NAME).exists() or any(run_dir.glob(JOURNALS)):
        record = read_object(run_dir / RECORD_NAME)
        named = f" ({record['run_id']}, started {record.get('started')})" if record.get("run_id") else ""
        state = (
            " that has ended" if record.get("ended") else f", of process {record['pid']}" if record.get("pid") else ""
        )
        raise UsageError(f"{run_dir} holds another run{named}{state}\n{_advice(record)}")


def _advice(record: dict[str, Any]) -> str:
    if record.get("endpoints") and not record.get("over", record.get("ended")):
        return (
            "it may still run: to take part in it, start this machine as before, or with --rdzv-endpoint HOST:PORT of another "
            "machine of it; if it is over, remove that directory"
        )
    return (
        "give this run another --run-id, or a --run-dir of its own; or remove that directory, with its journal and logs"
    )


def endpoints_of(spec: LaunchSpec) -> list[str]:
    """Return where the machines of a run meet; empty for one machine."""
    return [] if spec.cluster is None else [f"{host}:{port}" for host, port in spec.cluster.endpoints]


def component(name: str) -> str:
    """Return a directory's name that a peer has sent. Raises `ProtocolError` if it leads anywhere else."""
    if name in {"", ".", ".."} or "/" in name or "\0" in name:
        raise ProtocolError(f"the leader sent {name!r}, which is no name of a directory")
    return name


def records_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a run's agents that can be read."""
    return [read_object(path) for place in _PLACES for path in run_dir.glob(place)]


def outcome(run_dir: Path) -> int | None:
    """Return the exit code of a run that has ended; None if no readable record has it.

    Of several agents' records, that of the latest term counts: an agent that was cut off knows only its own end.
    """
    codes = (record for record in records_of(run_dir) if isinstance(record.get("exit_code"), int))
    return last_leaders([record for record in codes if record.get("ended")]).get("exit_code")


def last_leaders(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of the agent that led last; empty without records."""
    return max(records, key=lambda record: (bool(record.get("leader", True)), record.get("term") or 0), default={})


class RunRecord:
    """The record of a live run, written by a thread; times are ISO-8601, UTC."""

    def __init__(self, spec: LaunchSpec, log_dir: Path | None, *, leader: bool = True, term: int = 0) -> None:
        """`leader`: whether this agent leads, and since which term."""
        self._path = spec.run_dir / RECORD_NAME
        self.parts: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "run_id": spec.run_id,
            "run_dir": str(spec.run_dir),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "command": list(spec.target.argv),
            "endpoints": endpoints_of(spec),
            "mode": spec.target.mode.value,
            "world_size": spec.settings.world_size,
            "spares": spec.settings.spares,
            "nodes": spec.settings.nodes,
            "spare_nodes": spec.settings.spare_nodes,
            "capture_interval": spec.settings.capture_interval,
            "log_dir": None if log_dir is None else str(log_dir),
            "socket": str(spec.run_dir / SOCKET_NAME),
            "started": _now(),
            "ended": None,
            "exit_code": None,
            "reason": None,
            "over": False,
            "leader": leader,
            "term": term,
            "slurm_job": None if spec.slurm is None else spec.slurm.job_id,
            "chaos": None if spec.chaos is None else {"plan": spec.chaos.description(), "seed": spec.chaos.seed},
        }
        self._sink = Sink("deadpool-record", stays=False)
        self._failed = False
        self._write()

    def end(self, exit_code: int, reason: str, *, over: bool = True) -> None:
        """Mark the agent's end, and wait a while for the disk: srun's caller reads the exit code there.

        The run is not `over` if it continues without this agent.
        """
        self.parts |= {"ended": _now(), "exit_code": exit_code, "reason": reason, "over": over}
        self._write()
        if not self._sink.close(_GRACE_S):
            tell(f"the run's end is not in {self._path}: its disk did not answer within {_GRACE_S:g} s")

    def leave(self) -> None:
        """Write no more: another record takes its place."""
        self._sink.close(0.0)

    def _write(self) -> None:
        text = json.dumps(self.parts, indent=1) + "\n"
        self._sink.put(lambda: self._replace(text))

    def _replace(self, text: str) -> None:
        try:
            atomic_file.replace(self._path, text)
        except OSError as error:
            if not self._failed:
                tell(f"cannot write this run's record: {error} (`deadpool-run status` may not find the run)")
            self._failed = True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
