"""Copies of snapshots between simulated nodes: the replicator's work, without its threads and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from storage import Snapshot, free_slot
from workers import Gathering, Worker

from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.transfer.retention import Retention
from deadpool_run.wire import peers

if TYPE_CHECKING:
    from pretended import SimNode
    from shell_job import Job

_COPY_S = (0.005, 0.1)


class Copies:
    """A stand-in for the replicator: one node's slots and copies, and its traffic to other nodes."""

    def __init__(self, node: SimNode, on_safe: Callable[[Rank, tuple[Version, ...], bool, int], None]) -> None:
        self._node, self._job = node, node.job
        self._on_safe = on_safe
        self.name = node.here.node
        self.slots: dict[int, list[Snapshot | None]] = {}
        self.copies: dict[int, dict[int, tuple[int, int]]] = {}
        """For each rank and version: the content's token, and the timeline in which it was sent."""
        self.transcripts: set[int] = set()
        self.mine: dict[int, tuple[NodeId, ...]] = {}
        self.timeline = 0
        self.retention = Retention()
        self.closed = False
        self._acks: dict[tuple[int, NodeId], tuple[set[int], bool]] = {}
        self._reported: dict[int, Any] = {}

    @property
    def alive(self) -> bool:
        return not self.closed and not self._node.loop.ended and self._node.machine.power

    # --- for workers ---------------------------------------------------------------------------------------------

    def held(self, rank: int) -> dict[int, int]:
        return dict(slot for slot in self.slots.get(rank, ()) if slot is not None)

    def has(self, rank: int) -> dict[int, int]:
        return {version: token for version, (token, _) in self.copies.get(rank, {}).items()} | self.held(rank)

    def assign(self, rank: int, *, known_there: bool) -> None:
        if not known_there or rank not in self.slots:
            self.slots[rank] = [None, None]

    def capture(self, rank: int, snapshot: Snapshot) -> bool:
        """Keep a snapshot. Return False if both slots are needed, according to the leader's messages so far."""
        page = self._node.vault.status_page
        committed, abandoned = page.committed(), page.abandoned()
        slots = self.slots[rank]
        free = free_slot(slots, -1 if committed is None else committed, abandoned)
        if free is not None:
            slots[free] = snapshot
            self._send(rank, snapshot)
            self._call(self._report, rank)
        return free is not None

    def empty_above(self, rank: int, version: int) -> None:
        self.slots[rank] = [slot if slot is None or slot[0] <= version else None for slot in self.slots[rank]]

    def put(self, rank: int, snapshot: Snapshot) -> None:
        self.slots[rank] = [snapshot, None]
        self._send(rank, snapshot)

    # --- traffic -------------------------------------------------------------------------------------------------

    def _send_all(self, rank: int) -> None:
        for snapshot in self.held(rank).items():
            self._send(rank, snapshot)

    def _send(self, rank: int, snapshot: Snapshot) -> None:
        for other in self.mine.get(rank, ()):
            self._later(lambda other=other: self._arrive(rank, snapshot, other, self.timeline))

    def _later(self, what: Callable[[], None], more_s: float = 0.0) -> None:
        self._job.clock.after(self._job.rng.uniform(*_COPY_S) + more_s, what)

    def _arrive(self, rank: int, snapshot: Snapshot, other: NodeId, timeline: int) -> None:
        version, token = snapshot
        if not self.alive or timeline != self.timeline or other not in self.mine.get(rank, ()):
            return
        if self.held(rank).get(version) != token:
            return
        there = self._job.copies.get(other)
        if there is None or there.closed or there.timeline > timeline:
            return
        if not self._job.reaches(self.name, other) or there.timeline < timeline:
            self._later(lambda: self._arrive(rank, snapshot, other, timeline), 0.1)
            return
        copies = there.copies.setdefault(rank, {})
        copies[version] = (token, timeline)
        there.copies[rank] = {
            each: kept
            for each, kept in copies.items()
            if each in self.held(rank) or there.retention.may_need(Version(each))
        }
        if rank in self.transcripts:
            there.transcripts.add(rank)
        self._later(lambda: self._acknowledged(rank, other, timeline, there))

    def _acknowledged(self, rank: int, other: NodeId, timeline: int, there: Copies) -> None:
        if timeline == self.timeline and other in self.mine.get(rank, ()):
            held = {each for each, (_, sent) in there.copies.get(rank, {}).items() if sent == timeline}
            self._acks[rank, other] = held, rank in there.transcripts
            self._call(self._report, rank)

    def _call(self, what: Callable[..., None], *arguments: object) -> None:
        if self.alive:
            self._node.loop.call_soon(what, *arguments)

    def _report(self, rank: int) -> None:
        if self.closed or rank not in self.mine or rank not in self.slots:
            return
        held = set(self.held(rank))
        acks = [self._acks.get((rank, other), (set(), False)) for other in self.mine[rank]]
        versions = set.intersection(*(versions for versions, _ in acks)) & held if acks else held
        transcript = all(complete for _, complete in acks) if acks else rank in self.transcripts
        safe = (tuple(sorted(versions)), transcript, self.timeline)
        if self._reported.get(rank) != safe:
            self._reported[rank] = safe
            self._on_safe(Rank(rank), *safe)

    # --- for the node, as the replicator ---------------------------------------------------------------------------

    def set_buddies(
        self, buddies: Mapping[Rank, tuple[peers.Peer, ...]], groups: Collection[tuple[Rank, ...]] = ()
    ) -> None:
        assert not groups, "parities are not simulated"
        before = self.mine
        self.mine = {rank: tuple(peer.node for peer in others) for rank, others in buddies.items()}
        self._acks = {
            (rank, other): safe for (rank, other), safe in self._acks.items() if other in self.mine.get(rank, ())
        }
        self._reported = {rank: safe for rank, safe in self._reported.items() if rank in self.mine}
        for rank, others in self.mine.items():
            if others != before.get(rank):
                self._send_all(rank)
            self._report(rank)

    def keep(self, ranks: Collection[Rank], _groups: Collection[tuple[Rank, ...]] = ()) -> None:
        self.copies = {rank: held for rank, held in self.copies.items() if rank in ranks}

    def compute(self, _rank: Rank, _version: Version, done: Callable[[str | None], None]) -> None:
        done(None)

    def committed(self, newest: Version | None, abandoned: Collection[int]) -> None:
        self.retention.committed(newest, abandoned)

    def captured(self, _rank: Rank, _version: Version) -> None: ...

    def skipped(self) -> None: ...

    def is_refused(self, _rank: Rank) -> bool:
        """Return False: every node has memory for copies."""
        return False

    def transcript_completed(self, rank: Rank) -> None:
        self.transcripts.add(rank)
        self._send_all(rank)
        self._report(rank)

    def local_ranks(self) -> set[Rank]:
        return {Rank(rank) for rank in self.slots}

    def left(self, rank: Rank) -> None:
        held = {version: (token, self.timeline) for version, token in self.held(rank).items()}
        self.copies[rank] = self.copies.get(rank, {}) | held
        self.slots.pop(rank, None)
        self.mine.pop(rank, None)
        self._reported.pop(rank, None)

    def discard_above(self, timeline: int, version: Version) -> None:
        self.timeline = timeline
        self.retention.discard_above(version)
        self._acks.clear()
        for rank in self.slots:
            self.empty_above(rank, version)
        for rank, copies in self.copies.items():
            self.copies[rank] = {each: kept for each, kept in copies.items() if each <= version or kept[1] >= timeline}
        for rank in self.mine:
            self._send_all(rank)
            self._report(rank)

    def renew(self, timeline: int) -> None:
        self.timeline = timeline
        self.retention.renew()
        for each in (self.slots, self.copies, self.transcripts, self.mine, self._acks, self._reported):
            each.clear()

    def ranks(self) -> tuple[Rank, ...]:
        """Return the ranks that have snapshots or copies here."""
        return tuple(map(Rank, sorted(self.slots.keys() | self.copies.keys() | self.transcripts)))

    def versions(self, rank: Rank) -> tuple[Version, ...]:
        return tuple(Version(each) for each in sorted(self.has(rank))) if rank in self.transcripts else ()

    def report_all(self) -> None:
        for rank, safe in self._reported.items():
            self._on_safe(Rank(rank), *safe)

    def serve(self, sock: Any) -> None:
        sock.close()

    def traffic(self) -> peers.Traffic:
        return peers.Traffic(**dict.fromkeys(peers.Traffic.__struct_fields__, 0))

    def close(self) -> None:
        self.closed = True


class Storages:
    """The memory of all nodes, with the interface that workers of the other simulations use."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.nodes = job.copies

    def reaches(self, source: str, target: str) -> bool:
        return self._job.copies[source].alive and self._job.reaches(source, target)

    def held(self, rank: int, node: str) -> dict[int, int]:
        return self._job.copies[node].held(rank)

    def capture(self, rank: int, snapshot: Snapshot, _epoch: int, node: str) -> bool:
        return self._job.homes.get(rank) == node and self._job.copies[node].capture(rank, snapshot)

    def skip(self, rank: int, version: int) -> None:
        pass  # the worker reports it, and the leader tells all nodes

    def empty_above(self, rank: int, version: int, node: str) -> None:
        self._job.copies[node].empty_above(rank, version)

    def fetch(self, source: str, rank: int, version: int, node: str) -> bool:
        there, here = self._job.copies[source], self._job.copies[node]
        token = there.has(rank).get(version) if there.alive and self.reaches(source, node) else None
        if token is not None:
            here.put(rank, (version, token))
            here.transcripts.add(rank)
        return token is not None


class LinkedGathering(Gathering):
    """Collectives that wait while some of their hosts cannot reach each other."""

    def arrive(self, worker: Worker) -> None:
        here = {**self.present.get(worker.attached, {}), worker.rank: worker}
        names = sorted({each.node for each in here.values()})
        whole = len(here) == self.sim.settings.world_size
        if whole and not all(self.sim.reaches(one, other) for one, other in itertools.combinations(names, 2)):
            self.present.setdefault(worker.attached, {})[worker.rank] = worker
            self.sim.clock.after(0.2, self.healed)
        else:
            super().arrive(worker)

    def healed(self) -> None:
        for here in list(self.present.values()):
            if len(here) == self.sim.settings.world_size:
                self.arrive(here.pop(next(iter(here))))
