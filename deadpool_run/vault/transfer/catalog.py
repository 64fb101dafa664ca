"""What can be sent from this node, found wherever it lies; and whether what came is what was announced."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.segments import SegmentState
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.framing import Bucket, Meter, Outcome, Range
from deadpool_run.vault.transfer.replicas import TRANSCRIPT, Replicas
from deadpool_run.vault.transfer.streams import StripedReceives
from deadpool_run.vault.vault import Held, Vault


class Timeline:
    """The number of the present life: it grows with each roll-back and each generation."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0

    @property
    def number(self) -> int:
        """The present life."""
        return self._number

    def begin(self, number: int) -> None:
        """Begin a life."""
        with self._changed:
            self._number = number
            self._changed.notify_all()

    def wait_for(self, number: int, timeout_s: float) -> None:
        """Wait until this life, or a later one, has begun, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number, timeout_s)


class Captures:
    """Tells threads that a rank which lives here has captured a version, or has not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def tell(self) -> None:
        """Have everybody look who waits."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, true: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something is true that changes when something is told, at most so long."""
        with self._changed:
            self._changed.wait_for(true, timeout_s)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the threads of a replicator share."""

    vault: Vault
    replicas: Replicas
    timeline: Timeline
    captures: Captures
    striped_receives: StripedReceives
    streams: int
    """Connections for one segment, at most."""
    bucket: Bucket
    sent: Meter
    received: Meter
    spared: Meter
    """What buddies had already."""
    closing: threading.Event


@dataclass(frozen=True, slots=True)
class Source:
    """A snapshot or transcript open for reading. `still` tells whether it has not changed since."""

    fd: int
    nbytes: int
    token: bytes
    still: Callable[[], bool]
    close: Callable[[], None]

    def send(
        self,
        sock: socket.socket,
        shared: Shared,
        *,
        ranges: Sequence[Range] | None = None,
        wanted: Callable[[], bool] = lambda: True,
        end: bool = True,
    ) -> Outcome:
        """Send these ranges of it (None: all of it), while it is wanted. Raises OSError."""
        return framing.send_segment(
            sock,
            self.fd,
            [(0, self.nbytes)] if ranges is None else ranges,
            still=lambda: wanted() and self.still(),
            bucket=shared.bucket,
            meter=shared.sent,
            end=end,
        )


def find(shared: Shared, rank: Rank, version: Version | None) -> Source | None:
    """Open the rank's snapshot (None: transcript): its own if it lives here, else the copy that is held."""
    vault = shared.vault
    own = open_transcript(vault, rank) if version is TRANSCRIPT else _open_own(vault, rank, version)
    return own or _open_copy(shared.replicas, rank, version)


def open_held(vault: Vault, rank: Rank, held: Held) -> Source | None:
    """Open one of the rank's own slots, while it holds this."""
    fd = vault.open(rank, held)
    if fd is None:
        return None
    return Source(fd, held.nbytes, held.token, lambda: vault.still(rank, held), lambda: os.close(fd))


def open_transcript(vault: Vault, rank: Rank) -> Source | None:
    """Open the rank's own transcript, if it is complete."""
    fd = vault.open_transcript(rank)
    if fd is None:
        return None
    nbytes, token = segments.blob_bytes(fd), segments.blob_identity(fd)
    if nbytes is None:
        os.close(fd)
        return None

    def still() -> bool:
        return segments.blob_bytes(fd) == nbytes and segments.blob_identity(fd) == token

    return Source(fd, nbytes, token, still, lambda: os.close(fd))


def like(shared: Shared, rank: Rank, version: Version, *, patience_s: float) -> list[Callable[[], Source | None]]:
    """Return how to open what may have much in common with this snapshot of a rank that lives elsewhere.

    That is: the same version of each rank that lives here, of which those that are late are waited for a while; older
    copies of the rank itself; and copies of this version of other ranks.
    """
    vault, replicas = shared.vault, shared.replicas
    shared.captures.wait_for(lambda: all(vault.is_past(each, version) for each in vault.ranks()), patience_s)
    held = replicas.held()
    return [
        *(partial(_open_own, vault, each, version) for each in vault.ranks()),
        *(partial(_open_copy, replicas, rank, older) for older in sorted(held.get(rank, ()), reverse=True)),
        *(partial(_open_copy, replicas, each, version) for each in held if each != rank and version in held[each]),
    ]


def _open_own(vault: Vault, rank: Rank, version: Version) -> Source | None:
    held = next((each for each in vault.held(rank) if each.version == version), None)
    return None if held is None else open_held(vault, rank, held)


def _open_copy(replicas: Replicas, rank: Rank, version: Version | None) -> Source | None:
    found = replicas.open(rank, version)
    if found is None:
        return None
    copy, fd = found
    return Source(fd, copy.nbytes, copy.token, lambda: replicas.still(rank, copy), lambda: replicas.shut(copy, fd))


def is_sound(fd: int, version: Version | None, token: bytes, nbytes: int) -> bool:
    """Tell whether a segment that came is complete, of this version, content and size, and can be read."""
    if version is TRANSCRIPT:
        return (
            segments.blob_bytes(fd) == nbytes
            and segments.blob_identity(fd) == token
            and segments.read_blob(fd) is not None
        )
    header = segments.read_header(fd)
    if header is None or header.state is not SegmentState.COMPLETE or header.version != version:
        return False
    try:
        whole = segments.manifest_is_whole(fd, header)
    except SnapshotError:
        return False
    return whole and header.used_bytes == nbytes and segments.identity(fd) == token
