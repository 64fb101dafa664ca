"""Random losses of nodes: vaults deliver only the owner's captures of this life, and a committed version survives any one node.

The rules are those of the simulated storage (tests/sim/storage.py), here with real vaults, sockets and threads. Ranks
train in lockstep and capture under the slot rule; nodes are lost once all copies are where they should be; each repair
brings every rank to the newest version that all can be brought to, and is followed by other buddies.
"""

import asyncio
import os
import random

import pytest
from kit.choice import often
from vault_kit import KIB, LIMIT_S, Node, content, in_loop, off

from deadpool_run.core.copies.commit import Commits
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import free_slot
from deadpool_run.vault.transfer import chunks, receiver

RANKS = 4
SKIP = 0.1
_STEP_S = 0.2
"""The time of a step while nothing is reported."""
BODY_BYTES = 12 * KIB


def body(rank, version, token):
    """Return what a rank captures: some of it is every rank's, some its own, some never changes."""
    parts = [content(-1, version, nbytes=BODY_BYTES), content(rank, version, token, BODY_BYTES + rank * KIB)]
    return b"".join([*parts, content(rank, -1, nbytes=BODY_BYTES)])


class Job:
    """The coordinator's and the agents' part, without messages between them: all are told at the same moment."""

    begins_with: tuple[int, ...] = (2, 3, 4)
    fewest = 2

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.commits = Commits(RANKS)
        self.reported = asyncio.Event()
        self.nodes = {}
        self.homes, self.buddies, self.former, self.grouped = {}, {}, {}, {}
        self.truth = [{} for _ in range(RANKS)]
        """Per rank, version to the token of its content, in the life that counts."""
        self.timeline = self.step = self.made = self.tokens = 0

    def add_node(self):
        self.made += 1
        node = Node(f"n{self.made}", RANKS)
        node.heard = self.heard
        node.replicator.renew(self.timeline)
        self.nodes[node.name] = node

    def heard(self, rank, versions, transcript, timeline):
        self.reported.set()
        before = self.commits.committed
        self.commits.safe(rank, versions, transcript, timeline)
        self.tell()
        now = self.commits.committed
        if now != before:
            self.check_committed(now)

    def tell(self):
        for node in self.nodes.values():
            node.committed(self.commits.committed, self.commits.abandoned)

    def node_of(self, rank):
        return self.nodes[self.homes[rank]]

    def start(self):
        for _ in range(self.rng.choice(self.begins_with)):
            self.add_node()
        for rank in range(RANKS):
            self.homes[rank] = self.rng.choice(list(self.nodes))
            self.node_of(rank).complete_transcript(rank, f"of {rank}".encode())
            self.capture(rank, 0, skip=0.0)
        self.choose_buddies()

    def choose_buddies(self):
        self.former = self.buddies
        self.buddies = {
            rank: tuple(
                self.rng.sample(
                    [name for name in self.nodes if name != home],
                    min(self.rng.choice((1, 1, 2)), len(self.nodes) - 1),
                )
            )
            for rank, home in self.homes.items()
        }
        self.tell_buddies(())

    def tell_buddies(self, groups):
        """As the leader does: what former buddies hold does not count once there are others."""
        grouped_before, self.grouped = self.grouped, {rank: group for group in groups for rank in group}
        for rank, holders in self.buddies.items():
            regrouped = self.grouped.get(rank) != grouped_before.get(rank)
            if regrouped or not set(holders) <= set(self.former.get(rank, ())):
                self.commits.replaced(Rank(rank))
        nodes = list(self.nodes.values())
        self.rng.shuffle(nodes)
        for node in nodes:
            node.replicator.keep(
                {Rank(r) for r in range(RANKS) if node.name in (*self.buddies[r], *self.former.get(r, ()))}, groups
            )
            own = [rank for rank, home in self.homes.items() if home == node.name]
            node.replicator.set_buddies(
                {Rank(rank): tuple(self.nodes[name].peer for name in self.buddies[rank]) for rank in own}, groups
            )

    # --- training ------------------------------------------------------------------------------------------------

    def capture(self, rank, version, skip=SKIP):
        """Capture if there is a free slot, as workers do; else say that it is skipped."""
        node = self.node_of(rank)
        rank_entry, status_page = node.vault.status_page.rank_entries[rank], node.vault.status_page
        slot = (
            free_slot(rank_entry.slots, status_page.committed(), status_page.abandoned())
            if self.rng.random() >= skip
            else None
        )
        if slot is None:
            self.commits.skipped(Rank(rank), Version(version))
            self.tell()
            return
        self.tokens += 1
        self.truth[rank][version] = self.tokens
        node.capture(rank, version, slot=slot, body=body(rank, version, self.tokens))

    def train(self, chance=(0.5, 1.0, 1.0)):
        """All end a step; a loss may come when only some have captured it."""
        self.step += 1
        ranks = [rank for rank in range(RANKS) if self.rng.random() < self.rng.choice(chance)]
        for rank in ranks:
            self.capture(rank, self.step)

    async def let_run(self):
        """Let some of what is under way be done."""
        for _ in range(self.rng.choice((0, 1, 10, 100))):
            await off(os.sched_yield)

    async def until_protected(self):
        """Train until the next loss is survived: at once, or once the copies of the repair's version are made."""
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            self.train(chance=(1.0,))
            await self.let_run()
        async with asyncio.timeout(LIMIT_S):
            while not self.commits.protected:
                self.reported.clear()
                try:
                    await asyncio.wait_for(self.reported.wait(), _STEP_S)
                except TimeoutError:
                    self.train(chance=(1.0,))

    # --- losses --------------------------------------------------------------------------------------------------

    async def train_and_lose(self):
        for _ in range(self.rng.randint(0, 6)):
            self.train()
            await self.let_run()
        await self.rng.choice((self.lose_node, self.lose_node, self.lose_worker))()

    async def lose_node(self):
        name = self.rng.choice(list(self.nodes))
        node = self.nodes.pop(name)
        await node.close()
        await self.repair([rank for rank, home in self.homes.items() if home == name])

    async def lose_worker(self):
        """Its node lives; the rank may go elsewhere all the same."""
        rank = self.rng.randrange(RANKS)
        self.node_of(rank).vault.vacate(Rank(rank))
        await self.repair([], moved=[rank])

    async def repair(self, lost, moved=()):
        while len(self.nodes) < self.fewest or self.rng.random() < 0.3:
            self.add_node()
        sources = {}
        held = {rank: set(self.node_of(rank).vault.captured(Rank(rank))) for rank in range(RANKS) if rank not in lost}
        for rank in lost:
            sources[rank] = {
                name: set(self.nodes[name].replicator.versions(Rank(rank)))
                for name in (*self.buddies[rank], *self.former.get(rank, ()))
                if name in self.nodes
            }
            held[rank] = set().union(*sources[rank].values())
            for name, versions in sources[rank].items():
                self.check_copies(rank, name, versions, may_go=True)
        for rank in moved:
            sources[rank] = {self.homes[rank]: held[rank]}
        resume = max(set.intersection(*held.values()), default=None)
        assert resume is not None, f"nobody can go on: {held}"
        assert self.commits.committed is None or resume >= self.commits.committed, "what was committed is lost"
        await self.bring(sources, resume)
        self.choose_buddies()

    async def bring(self, sources, resume):
        seats = {}
        for rank, holders in sources.items():
            name = self.rng.choice(list(self.nodes))
            near = self.rng.choice([None, *holders])
            seats[rank] = near or name
        before = dict(self.homes)
        for rank, name in seats.items():
            holders = [holder for holder, versions in sources[rank].items() if versions]
            source = None if name in holders else self.nodes[holders[0]].peer
            self.homes[rank] = name
            if before[rank] in self.nodes and before[rank] != name:
                self.nodes[before[rank]].replicator.left(Rank(rank))
            assert await self.nodes[name].seat(rank, source) is None
            assert self.nodes[name].transcript(rank) == f"of {rank}".encode()
        self.timeline += 1
        self.commits.discard_above(self.timeline, Version(resume))
        for node in self.nodes.values():
            node.replicator.discard_above(self.timeline, Version(resume))
        self.tell()
        for rank in range(RANKS):
            self.truth[rank] = {version: token for version, token in self.truth[rank].items() if version <= resume}
        await self.let_run()
        for rank in range(RANKS):
            node = self.node_of(rank)
            if resume not in node.vault.captured(Rank(rank)):
                source = next(name for name, versions in sources[rank].items() if resume in versions)
                failure = await self.fill(rank, resume, self.nodes[source])
                assert failure is None, failure
            node.empty_above(rank, resume)
            self.check_own(rank, resume)
        self.step = resume

    async def fill(self, rank, version, source):
        return await self.node_of(rank).fetch(rank, version, source.peer)

    # --- what must hold ------------------------------------------------------------------------------------------

    def check_own(self, rank, version):
        expected = body(rank, version, self.truth[rank][version])
        assert self.node_of(rank).body(rank, version) == expected, f"rank {rank} resumes from another life's {version}"

    def check_copies(self, rank, name, versions, *, may_go=False):
        """With `may_go`, a copy may be gone by now: its lost owner's last message, that it holds newer ones, was read only then."""
        node = self.nodes[name]
        for version in versions:
            found = node.copy_of(rank, version)
            if found is None and may_go and version not in node.replicator.versions(Rank(rank)):
                continue
            expected = body(rank, version, self.truth[rank].get(version))
            assert found == expected, f"{name} holds another {version} of rank {rank}"

    def check_committed(self, version):
        for rank, holders in self.buddies.items():
            for name in holders:
                if name in self.nodes:
                    self.check_copies(rank, name, [version])

    async def close(self):
        nodes, self.nodes = list(self.nodes.values()), {}
        for node in nodes:
            await node.close()


class ParityJob(Job):
    """Ranks on different nodes share parities in place of copies."""

    begins_with = (3, 4, 5)
    fewest = 3
    computed = 0

    def choose_buddies(self):
        self.former = self.buddies
        ranks, groups, most = self.rng.sample(range(RANKS), RANKS), [], self.rng.choice((2, 3, 3))
        while ranks:
            group = [ranks.pop()]
            for rank in list(ranks):
                homes = {self.homes[each] for each in group}
                if len(group) < min(most, len(self.nodes) - 1) and self.homes[rank] not in homes:
                    ranks.remove(rank)
                    group.append(rank)
            groups.append(tuple(map(Rank, sorted(group))))
        for group in groups:
            homes = {self.homes[rank] for rank in group}
            holder = self.rng.choice([name for name in self.nodes if name not in homes])
            self.buddies = {**self.buddies, **dict.fromkeys(group, (holder,))}
        self.tell_buddies([group for group in groups if len(group) > 1])

    async def fill(self, rank, version, source):
        self.computed += source.copy_of(rank, version) is None
        if self.node_of(rank) is source:
            return await source.compute(rank, version)
        return await super().fill(rank, version, source)

    def check_copies(self, rank, name, versions, *, may_go=False):
        """Of ranks that share a parity there is no copy until one is computed."""
        there = [version for version in versions if self.nodes[name].copy_of(rank, version) is not None]
        super().check_copies(rank, name, there, may_go=may_go)


@pytest.mark.parametrize("seed", often(range(12), set(range(4))))
@in_loop
async def test_what_is_computed_from_parities_is_what_was_captured(seed, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * KIB)
    monkeypatch.setattr(receiver, "_CAPTURE_WAIT_S", 0.05)
    job = ParityJob(seed)
    try:
        job.start()
        for _ in range(8):
            await job.until_protected()
            await job.train_and_lose()
        assert job.timeline == 8
        assert job.computed
    finally:
        await job.close()


@pytest.mark.parametrize("seed", range(12))
@in_loop
async def test_what_is_delivered_is_what_was_captured(seed, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * KIB)
    monkeypatch.setattr(receiver, "_CAPTURE_WAIT_S", 0.05)
    job = Job(seed)
    try:
        job.start()
        spared = 0
        for _ in range(8):
            await job.until_protected()
            spared = max(spared, *(node.replicator.traffic().spared_bytes for node in job.nodes.values()))
            await job.train_and_lose()
        assert job.timeline == 8
        assert spared > 0
    finally:
        await job.close()
