"""Finds the snapshots and transcripts of this node that can be sent, and checks those that arrived."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.framing import Bucket, Meter, Outcome, Range
from deadpool_run.vault.transfer.replicas import TRANSCRIPT, Replicas
from deadpool_run.vault.transfer.streams import StripedReceives
from deadpool_run.vault.vault import Held, Vault


class Timeline:
    """The number of the present timeline, which grows with each rollback and each generation."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.number = 0

    def begin(self, number: int) -> None:
        """Begin a timeline."""
        with self._changed:
            self.number = number
            self._changed.notify_all()

    def wait_for(self, number: int, timeout_s: float) -> None:
        """Wait up to `timeout_s` until this timeline or a later one has begun."""
        with self._changed:
            self._changed.wait_for(lambda: self.number >= number, timeout_s)


@dataclass(frozen=True, slots=True)
class Shared:
    """The state that a replicator's threads share."""

    vault: Vault
    streams: int
    """The maximum number of connections for one segment."""
    bucket: Bucket
    closing: threading.Event
    replicas: Replicas = field(default_factory=Replicas)
    timeline: Timeline = field(default_factory=Timeline)
    captures: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a rank that lives here has captured or skipped a version."""
    striped_receives: StripedReceives = field(default_factory=StripedReceives)
    sent: Meter = field(default_factory=Meter)
    received: Meter = field(default_factory=Meter)
    deduplicated: Meter = field(default_factory=Meter)
    """Bytes that buddies had already."""


@dataclass(frozen=True, slots=True)
class Source:
    """A snapshot or transcript open for reading. `still` returns whether it is unchanged."""

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
        ranges: Sequence[Range],
        wanted: Callable[[], bool] = lambda: True,
        end: bool = True,
    ) -> Outcome:
        """Send these ranges while it is wanted. Raises OSError."""
        return framing.send_segment(
            sock,
            self.fd,
            ranges,
            still=lambda: wanted() and self.still(),
            bucket=shared.bucket,
            meter=shared.sent,
            end=end,
        )


def find(shared: Shared, rank: Rank, version: Version | None) -> Source | None:
    """Open the rank's snapshot (None: transcript): its own if it lives here, else a copy."""
    vault = shared.vault
    own = open_transcript(vault, rank) if version is TRANSCRIPT else _open_own(vault, rank, version)
    return own or _open_copy(shared.replicas, rank, version)


def open_held(vault: Vault, rank: Rank, held: Held) -> Source | None:
    """Open the rank's own slot with this snapshot."""
    fd = vault.open(rank, held)
    if fd is None:
        return None
    return Source(fd, held.nbytes, held.token, lambda: vault.still(rank, held), lambda: os.close(fd))


def open_transcript(vault: Vault, rank: Rank) -> Source | None:
    """Open the rank's own transcript, if it is complete."""
    fd = vault.open_transcript(rank)
    if fd is None:
        return None
    header = segments.blob_header(fd)
    if header is None:
        os.close(fd)
        return None
    return Source(fd, *header, lambda: segments.blob_header(fd) == header, lambda: os.close(fd))


def similar(shared: Shared, rank: Rank, version: Version, *, timeout_s: float) -> list[Callable[[], Source | None]]:
    """Return functions that open segments with probably many equal chunks to this snapshot of another node's rank.

    Those are: the same version of each rank that lives here, for which it waits up to `timeout_s`; older copies of the
    rank itself; and copies of this version of other ranks.
    """
    vault, replicas = shared.vault, shared.replicas
    with shared.captures:
        shared.captures.wait_for(lambda: all(vault.is_past(each, version) for each in vault.ranks()), timeout_s)
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
    """Return whether a received segment is complete, readable, and of this version, content and size."""
    if version is TRANSCRIPT:
        return segments.blob_header(fd) == (nbytes, token) and segments.read_blob(fd) is not None
    header = segments.read_complete(fd, version)
    if header is None or (header.used_bytes, header.token) != (nbytes, token):
        return False
    try:
        return segments.manifest_is_whole(fd, header)
    except SnapshotError:
        return False
