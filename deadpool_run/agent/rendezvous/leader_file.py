"""The leader file: `leader.json` in the run's directory names the leader, for agents and viewers on a shared disk.

Each new leader replaces it. Where the disk is not shared the file has no use and does no harm.
"""

from pathlib import Path

from deadpool_run.agent import atomic_file
from deadpool_run.coordinator.address import POINTER_NAME
from deadpool_run.errors import ProtocolError
from deadpool_run.structs import Untagged
from deadpool_run.wire.typed import Decoder, to_json


class LeaderFile(Untagged):
    """Where the leader runs and listens."""

    term: int
    node: str
    host: str
    """The machine's own name."""
    address: str
    port: int
    run_dir: str
    """Holds the leader's control socket."""


_DECODER: Decoder[LeaderFile] = Decoder(LeaderFile, "a leader file")


def write(base: Path, leader: LeaderFile) -> None:
    """Write the file in the run's directory, unless one of a later term is there. Raises OSError."""
    before = read(base)
    if before is None or before.term <= leader.term:
        atomic_file.replace(base / POINTER_NAME, to_json(leader).decode())


def read(base: Path) -> LeaderFile | None:
    """Return the file's content; None if there is no file, or none that can be read."""
    try:
        return _DECODER.decode((base / POINTER_NAME).read_bytes())
    except (OSError, ProtocolError):
        return None
