"""The sending side of a vault: a thread for each rank that lives here and each of its buddies.

There is no queue: when a delivery has ended, the thread picks the newest snapshot. So a newer snapshot replaces one that
waited, and training never waits. Within a timeline, no snapshot is sent after a newer one.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from deadpool_run.core.copies.parity_groups import Group
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.transfer import exchange, headers, streams
from deadpool_run.vault.transfer.catalog import Shared, Source, open_held, open_transcript
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.headers import Identity
from deadpool_run.vault.transfer.replicas import TRANSCRIPT
from deadpool_run.vault.vault import Held, Vault
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Peer

_LOG = logging.getLogger("deadpool_run")
_RETRY_S = (0.05, 1.0)
"""The shortest and the longest wait after a failed delivery; a newer version is tried after the shortest."""
_REFUSED_S = 1.0
"""A buddy that has had no memory for this long is reported: other memory may be freed at any moment."""


class LocalVersions:
    """The valid snapshots of a rank that lives here. Thread-safe.

    After a rollback to version v, a slot may hold a newer version of the last timeline until the worker has emptied it:
    above v, only snapshots captured since are valid.
    """

    def __init__(self, vault: Vault, rank: Rank, floor: Version | None) -> None:
        self._vault = vault
        self._rank = rank
        self._lock = threading.Lock()
        self._floor = floor
        self._since: set[Version] = set()

    def captured(self, version: Version) -> None:
        """Note a version of this timeline."""
        with self._lock:
            held = {each.version for each in self._vault.held(self._rank)}
            self._since = {each for each in self._since if each in held} | {version}

    def discard_above(self, version: Version) -> None:
        """Note that newer versions belong to an old timeline."""
        with self._lock:
            self._floor, self._since = version, set()

    def held(self) -> list[Held]:
        """Return the valid snapshots, oldest first."""
        with self._lock:
            found = self._vault.held(self._rank)
            return [
                each
                for each in found
                if self._floor is None or each.version <= self._floor or each.version in self._since
            ]


@dataclass(slots=True)
class _Known:
    """The segments that the buddy is known to hold, in one timeline."""

    timeline: int
    held: list[Identity] = field(default_factory=list)
    transcript: bytes | None = None
    last: Version | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    version: Version | None
    source: Source
    timeline: int
    held: list[Identity]


class ReplicationLink:
    """Keeps one buddy of one rank up to date. For the loop."""

    def __init__(  # noqa: PLR0913 - what it reads, writes and tells
        self,
        *,
        rank: Rank,
        peer: Peer,
        local: LocalVersions,
        group: Group,
        shared: Shared,
        on_change: Callable[[Rank], object],
        on_refused: Callable[[Rank, Peer], object],
    ) -> None:
        """Start. `group` are the ranks whose parity the buddy keeps; empty if it keeps copies of the rank.

        `on_change` is called on the link's thread when the buddy's segments have changed. So is `on_refused` when `refuses` has changed.
        """
        self._rank = rank
        self._peer = peer
        self.group = group
        self._local = local
        self._shared = shared
        self._on_change, self._on_refused = on_change, on_refused
        self.refuses = False
        """Whether the buddy has no memory for the rank's copies, for some time already."""
        self._refused_at: float | None = None
        self._changed = threading.Condition()
        self._known = _Known(shared.timeline.number)
        self._stream_pool = shared.connections_to(peer)
        self._stopping = False
        self._woken = True
        self._failed_at = 0.0
        self._retry_s = _RETRY_S[0]
        """The wait before a retry."""
        self._failed = False
        self._passed: Version | None = None
        """The version that a parity did not take the last time, because other ranks of the group do not send it."""
        self.thread = threading.Thread(target=self._run, name=f"deadpool-send-{rank}", daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """Look for something to send now."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._stream_pool.shut_down()

    def safe(self, timeline: int) -> tuple[frozenset[Identity], bytes | None]:
        """Return the snapshots that the buddy holds in this timeline, and the token of its transcript."""
        with self._changed:
            known = self._known
            return (frozenset(known.held), known.transcript) if known.timeline == timeline else (frozenset(), None)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (done := self._attempt()) is not None:
            with self._changed:
                self._failed = not done
                self._failed_at = 0.0 if done else time.monotonic()
                self._retry_s = _RETRY_S[0] if done else min(self._retry_s * 2, _RETRY_S[1])
                self._woken |= done
        self._stream_pool.close()

    def _attempt(self) -> bool | None:
        """Wait until there is something to send, and send it. False: try again later. None: stop."""
        try:
            offer = self._await_offer()
            if offer is None:
                return None
            with contextlib.closing(offer.source):
                return self._deliver(offer)
        except (OSError, ProtocolError) as error:  # the former also of this machine: no descriptors or memory are left
            _LOG.debug("rank %d cannot be copied to %s: %s", self._rank, self._peer.node, error)
            self._stream_pool.close()
            return False

    def _await_offer(self) -> _Offer | None:
        """Wait until there is something to send; None: stop."""
        with self._changed:
            while not self._stopping:
                wait_s = _RETRY_S[0] if self._woken else self._retry_s
                left_s = self._failed_at + wait_s - time.monotonic()
                if not self._woken and not self._failed:
                    self._changed.wait()
                elif left_s > 0:
                    self._changed.wait(left_s)
                else:
                    self._woken = self._failed = False
                    offer = self._choose()
                    if offer is not None:
                        return offer
        return None

    def _choose(self) -> _Offer | None:
        timeline = self._shared.timeline.number
        if self._known.timeline != timeline:
            self._known = _Known(timeline)
        known, held = self._known, self._local.held()
        identities = [(each.version, each.token) for each in held]
        if known.transcript is None:
            source = open_transcript(self._shared, self._rank)
            if source is not None:
                return _Offer(TRANSCRIPT, source, timeline, identities)
        missing = [each for each in held if (each.version, each.token) not in known.held]
        missing.sort(key=self._urgency, reverse=True)
        for each in sorted(missing, key=lambda each: each.version == self._passed):
            if known.last is None or each.version > known.last:
                source = open_held(self._shared, self._rank, each)
                if source is not None:
                    return _Offer(each.version, source, timeline, identities)
        return None

    def _urgency(self, held: Held) -> tuple[bool, Version]:
        """Order by version; for a buddy without any, the version that all ranks have is first: no rank may lose it."""
        committed, resumed = self._shared.vault.committed(), self._shared.replicas.retention.resumed
        common = resumed if committed is None else max(committed, resumed)
        return self._known.last is None and held.version == common, held.version

    def _deliver(self, offer: _Offer) -> bool:
        """Send the chunks that the buddy does not have. False: try again later. Raises OSError and `ProtocolError`."""
        connection, source = self._stream_pool.first(), offer.source
        began, hashed_s = time.monotonic(), source.digests.hashed_s
        delivery = secrets.token_bytes(headers.TOKEN_BYTES)
        parts = 1 + self._stream_pool.open(streams.worthwhile(source.nbytes, self._shared.streams) - 1)
        put = headers.Put(
            rank=self._rank,
            version=offer.version,
            token=source.token,
            nbytes=source.nbytes,
            timeline=offer.timeline,
            held=offer.held,
            of=parts,
            delivery=delivery,
            group=self.group,
            home=self._shared.here if self.group else None,
        )
        headers.send(connection, put)
        answer = headers.receive_answer(connection)
        is_sent = isinstance(answer, headers.Go)
        if is_sent:
            self._send(offer, delivery, parts)
            answer = headers.receive_answer(connection)
        self._note_memory(answer)
        if not isinstance(answer, headers.HeldVersions):
            _LOG.debug("%s does not take rank %d: %s", self._peer.node, self._rank, answer)
            self._passed = offer.version if self.group else None
            return False
        self._passed = None
        if is_sent and offer.version is not TRANSCRIPT:
            times = self._shared.copy_times
            times.copied_s, times.hashed_s = time.monotonic() - began, (source.digests.hashed_s - hashed_s) / parts
        self._learn(offer, answer)
        return True

    def _note_memory(self, answer: headers.Answer) -> None:
        """Report it if the buddy has had no memory for a while, or has memory again."""
        if isinstance(answer, headers.No) and answer.no_memory:
            self._refused_at = self._refused_at or time.monotonic()
            refuses = time.monotonic() - self._refused_at >= _REFUSED_S
        elif isinstance(answer, headers.HeldVersions):
            self._refused_at, refuses = None, False
        else:
            return
        if refuses is not self.refuses:
            self.refuses = refuses
            self._on_refused(self._rank, self._peer)

    def _send(self, offer: _Offer, delivery: bytes, of: int) -> None:
        """Send each part over its own connection. Raises OSError.

        The first part ends last: the buddy waits for its end, and so learns at once if another connection breaks.
        """
        outcomes: list[Outcome] = []
        source, digests, shared = offer.source, offer.source.digests, self._shared

        def still() -> bool:
            return shared.timeline.number == offer.timeline and source.still()

        def send(part: int, connection: PeerConnection) -> None:
            if part:
                headers.send(connection, headers.PartHeader(delivery, part, of))
            outcome = exchange.send_part(connection, source, shared, range(part, digests.blocks, of), still)
            outcomes.append(outcome)
            if part:
                exchange.end_part(connection, digests, part, of, outcome)

        self._stream_pool.work(*(partial(send, part) for part in range(of)))
        exchange.end_part(self._stream_pool.first(), digests, 0, of, max(outcomes))

    def _learn(self, offer: _Offer, answer: headers.HeldVersions) -> None:
        if offer.version is TRANSCRIPT and answer.transcript != offer.source.token:
            raise ProtocolError("a buddy does not hold the transcript that it accepted")
        with self._changed:
            if self._known.timeline != offer.timeline:
                return
            if offer.version is not TRANSCRIPT:
                self._known.last = offer.version
            self._known.held, self._known.transcript = answer.held, answer.transcript
        self._on_change(self._rank)
