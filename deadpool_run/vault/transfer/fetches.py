"""Fetches for replacements on this node: at most one for each rank, each after the end of the rank's last one.

The snapshot of a replacement's rank is fetched as soon as the resume version is known, beside the rehearsal. Only the order to
resume publishes it, because a worker takes over its slots during its set-up.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.transfer.catalog import Shared
from deadpool_run.vault.transfer.decode import Others
from deadpool_run.vault.transfer.fetch import (
    Fetched,
    FetchTask,
    OpenConnections,
    check_held,
    compute_snapshot,
    fetch_snapshot,
    fetch_transcript,
    is_held,
    publish,
)
from deadpool_run.vault.transfer.memory import Memory
from deadpool_run.wire.peers import Peer

Done = Callable[[str | None], None]


@dataclass(slots=True)
class _Seat:
    """A replacement's rank whose state is on another node, until the order to resume."""

    source: Peer
    resume: Version | None
    """None if it is not known yet."""
    has_transcript: bool = False
    ahead: FetchTask[Fetched] | None = None
    """Fetches `resume`."""


class Fetches:
    """Prepares the memory of replacements here. For the event loop; `Replicator` describes the methods of the same names."""

    def __init__(
        self,
        shared: Shared,
        loop: asyncio.AbstractEventLoop,
        *,
        call: Callable[..., bool],
        on_captured: Callable[[Rank, Version], None],
        on_seated: Callable[[Rank], None],
    ) -> None:
        """`call` calls a function in the loop from any thread, and returns False if the loop is closed.

        `on_captured` gets each version that a slot holds now, `on_seated` each rank whose memory is ready.
        """
        self._shared = shared
        self._vault = shared.vault
        self._loop = loop
        self._call = call
        self._on_captured, self._on_seated = on_captured, on_seated
        self._seats: dict[Rank, _Seat] = {}
        self._tasks: dict[Rank, FetchTask[Any]] = {}
        self._cancelled: dict[Rank, FetchTask[Any]] = {}  # the rank's next fetch waits for the end of this one
        self._ending: list[FetchTask[Any]] = []
        self.last = (0, 0.0)
        """Bytes and seconds of the last fetch."""

    def ranks(self) -> set[Rank]:
        """Return the ranks whose state is being fetched, or will be."""
        return {*self._tasks, *self._seats}

    def tasks(self) -> list[FetchTask[Any]]:
        """Return all tasks that may run."""
        return [*self._ending, *self._tasks.values()]

    def seat(self, rank: Rank, source: Peer | None, resume: Version | None, done: Done) -> None:
        """See `Replicator.seat`."""
        self.cancel(rank)
        if source is not None:
            self._seats[rank] = _Seat(source, resume)
        here = source is None and self._vault.has_transcript(rank)
        moved = not here and self._shared.replicas.move_to(self._vault, rank, left=source is None)
        if source is not None and not moved:
            self._seat_by_transcript(rank, source, done)
            return
        if moved:
            here = True
            for held in self._vault.held(rank):
                self._on_captured(rank, held.version)
        why = None if here else f"this node holds no snapshot and transcript of rank {rank}"
        self._loop.call_soon(self._seated, rank, done, why)

    def resume_known(self, version: Version) -> None:
        """Fetch this version for all replacements that are to be ordered to resume from it."""
        for rank, seat in self._seats.items():
            seat.resume = version
            self._fetch_ahead(rank, seat)

    def _fetch_ahead(self, rank: Rank, seat: _Seat) -> None:
        version, seat.ahead = seat.resume, None
        if version is None or not seat.has_transcript or self._has(rank, version):
            return
        connections, act = self._from(seat.source, rank, version)
        began = time.monotonic()

        def end(fetched: Fetched | None, _failure: str | None) -> None:
            """Note how fast it was. If it failed, the order fetches it, and may fail."""
            if fetched is not None:
                self.last = (fetched.digests.nbytes, time.monotonic() - began)

        self._tasks[rank] = seat.ahead = FetchTask(
            name=f"ahead-{rank}",
            peer=seat.source,
            connections=connections,
            act=act,
            on_end=partial(self._call, end),
            after=self._stop(rank),
        )

    def fetch(self, rank: Rank, version: Version, source: Peer, done: Done) -> None:
        """See `Replicator.fetch`."""
        connections, act = self._from(source, rank, version)
        seat = self._seats.pop(rank, None)
        ahead = None if seat is None or seat.resume != version else seat.ahead
        self._fill(rank, version, done, source=source, connections=connections, act=act, ahead=ahead)

    def _from(self, source: Peer, rank: Rank, version: Version) -> tuple[OpenConnections, Callable[[], Fetched]]:
        """Return connections to a node, and a function that fetches the version over them."""
        stream_pool = self._shared.connections_to(source)
        timeline = self._shared.timeline.number
        return stream_pool, partial(fetch_snapshot, self._shared, rank, version, timeline, stream_pool)

    def compute(self, rank: Rank, version: Version, done: Done) -> None:
        """See `Replicator.compute`."""
        self._seats.pop(rank, None)
        others = Others(self._shared)
        act: Callable[[], Fetched | None] = partial(check_held, self._vault, rank, version)
        if not is_held(self._vault, rank, version) and version in self._shared.replicas.snapshots(rank):
            act = partial(compute_snapshot, self._shared, rank, version, self._shared.timeline.number, others)
        elif (task := self._tasks.get(rank) or self._cancelled.get(rank)) is None or not task.thread.is_alive():
            done(None)
            return
        self._fill(rank, version, done, source=self._shared.here, connections=others, act=act)

    def _fill(  # noqa: PLR0913 - what is filled, from where and how
        self,
        rank: Rank,
        version: Version,
        done: Done,
        *,
        source: Peer,
        connections: OpenConnections,
        act: Callable[[], Fetched | None],
        ahead: FetchTask[Fetched] | None = None,
    ) -> None:
        """Have `act` fill a slot, unless `ahead` does; then publish it."""
        began = time.monotonic()
        if ahead is not None:
            self._end_later(self._tasks.pop(rank))

        def fill() -> int:
            """Return how many bytes were fetched for this order."""
            if ahead is not None and ahead.result is not None:
                publish(self._shared, rank, version, ahead.result)
                return 0
            fetched = act()
            return 0 if fetched is None else publish(self._shared, rank, version, fetched)

        def end(nbytes: int | None, failure: str | None) -> None:
            if nbytes is not None and failure is None and self._tasks.get(rank) is fetch_task:
                self.last = (nbytes, time.monotonic() - began) if nbytes else self.last
                self._on_captured(rank, version)
            self._seated(rank, done, failure)

        fetch_task = self._tasks[rank] = FetchTask(
            name=f"fetch-{rank}",
            peer=source,
            connections=connections,
            act=fill,
            on_end=partial(self._call, end),
            after=ahead or self._stop(rank),
        )

    def _has(self, rank: Rank, version: Version) -> bool:
        return is_held(self._vault, rank, version) or version in self._shared.replicas.snapshots(rank)

    def fetch_transcript(self, rank: Rank, source: Peer, done: Callable[[Memory | None, str | None], None]) -> None:
        """See `Replicator.fetch_transcript`."""
        self._end_later(self._transcript_task(rank, source, done, after=None))

    def _transcript_task(
        self, rank: Rank, source: Peer, done: Callable[[Memory | None, str | None], None], after: FetchTask[Any] | None
    ) -> FetchTask[Memory]:
        def on_end(memory: Memory | None, failure: str | None) -> None:
            if not self._call(done, memory, failure) and memory is not None:
                memory.close()

        stream_pool = self._shared.connections_to(source)
        return FetchTask(
            name=f"transcript-{rank}",
            peer=source,
            connections=stream_pool,
            act=partial(fetch_transcript, self._shared, rank, self._shared.timeline.number, stream_pool),
            on_end=on_end,
            after=after,
        )

    def _seat_by_transcript(self, rank: Rank, source: Peer, done: Done) -> None:
        def end(memory: Memory | None, failure: str | None) -> None:
            if memory is not None and self._tasks.get(rank) is fetch_task:
                self._vault.put(rank, (), memory.give())
                self._shared.replicas.drop(rank)
            elif memory is not None:
                memory.close()
                failure = failure or "the fetch was cancelled"
            self._seated(rank, done, failure)

        fetch_task = self._tasks[rank] = self._transcript_task(rank, source, end, self._stop(rank))

    def cancel(self, rank: Rank) -> None:
        """Stop the rank's fetch, whose end the next one waits for, and fetch nothing ahead."""
        self._seats.pop(rank, None)
        if (task := self._stop(rank)) is not None:
            self._cancelled[rank] = task

    def _stop(self, rank: Rank) -> FetchTask[Any] | None:
        """Stop the rank's fetch; return what the rank's next one has to wait for."""
        fetch_task = self._tasks.pop(rank, None)
        if fetch_task is not None:
            fetch_task.stop()
            self._end_later(fetch_task)
        return fetch_task or self._cancelled.pop(rank, None)

    def _seated(self, rank: Rank, done: Done, failure: str | None) -> None:
        if failure is None:
            self._on_seated(rank)
            if (seat := self._seats.get(rank)) is not None and not seat.has_transcript:
                seat.has_transcript = True
                self._fetch_ahead(rank, seat)
        done(failure)

    def _end_later(self, task: FetchTask[Any]) -> None:
        """Have `close` wait for a thread that ends by itself."""
        self._ending = [*(other for other in self._ending if other.thread.is_alive()), task]
