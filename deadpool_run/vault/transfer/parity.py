"""Parities: the XOR of the snapshots of a group of ranks, from which any one of them can be computed with the others.

A group's ranks live on different nodes, and its parity on another one. So a parity takes the memory of one snapshot, where
copies take that of one for each rank. A snapshot of a lost rank is computed from the parity and the snapshots that the other
ranks' nodes have; if two of a group are lost at once, there is none.

Chunks are added as they arrive, each once: a delivery that breaks is continued with the chunks that are missing. A snapshot
counts as held only once the parity has those of all ranks of its group.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from deadpool_run.core.copies.parity_groups import Group
from deadpool_run.errors import NoMemoryError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import create_memory, whole_pages
from deadpool_run.vault.transfer.chunks import ChunkDigests, Hasher, range_of
from deadpool_run.vault.transfer.headers import Put
from deadpool_run.vault.transfer.retention import Retention
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.peers import Peer

_LOCKS = 64
_MAX_SPARES = 1


def xor_into(target: memoryview, data: memoryview) -> None:
    """Replace the first bytes of `target` by their XOR with `data`. Other threads run meanwhile."""
    import numpy as np  # noqa: PLC0415 - only jobs with parities need it

    part = np.frombuffer(target[: len(data)], np.uint8)
    np.bitwise_xor(part, np.frombuffer(data, np.uint8), out=part)


@dataclass(slots=True)
class ParityPart:
    """One rank's snapshot in a parity, as far as it has arrived."""

    rank: Rank
    digests: ChunkDigests
    home: Peer
    """The node that has the snapshot itself."""
    timeline: int
    """The newest one in which its owner has it."""
    added: bytearray
    """One for each chunk that the parity has."""
    whole: bool = False
    """It has all of them, and the owner has vouched for their order."""


class Parity:
    """The parity of one version of a group's snapshots."""

    def __init__(self, group: Group, version: Version, memory: int) -> None:
        self.group, self.version = group, version
        self.parts: dict[Rank, ParityPart] = {}
        self.void = False
        """It has something that belongs to no snapshot."""
        self.users = 0
        """Threads that read or write its memory, which is not used again meanwhile."""
        self.computing = threading.Lock()
        """Held while one rank's snapshot is computed."""
        self._memory = memory
        self._covered = bytearray()
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    @property
    def is_whole(self) -> bool:
        """Whether it has the snapshots of all ranks."""
        return not self.void and len(self.parts) == len(self.group) and all(part.whole for part in self.parts.values())

    @property
    def taken(self) -> int:
        """How much memory this takes, in bytes."""
        return os.fstat(self._memory).st_size

    @property
    def nbytes(self) -> int:
        """How much memory this takes with all that has been announced."""
        return max((_size(part.digests.chunks) for part in self.parts.values()), default=0)

    def holds_in(self, timeline: int) -> bool:
        """Return whether it has all snapshots, and the owners have them in this timeline or a later one."""
        return self.is_whole and timeline <= min(each.timeline for each in self.parts.values())

    def add(self, part: ParityPart, chunk: int, data: memoryview) -> None:
        """Add a chunk of a part, once."""
        begin, end = range_of(chunk)
        with self._locks[chunk % _LOCKS]:
            if part.added[chunk]:
                return
            try:
                if self._covered[chunk]:
                    before = bytearray(end - begin)
                    _transfer(os.preadv, self._memory, before, begin)
                    with memoryview(before) as whole:
                        xor_into(whole, data)
                else:
                    before = bytearray(data) + bytes(end - begin - len(data))  # the memory may hold an older parity
                _transfer(os.pwritev, self._memory, before, begin)
            except BaseException:
                self.void = True
                raise
            self._covered[chunk] = part.added[chunk] = 1

    def read(self, chunk: int, target: memoryview) -> None:
        """Read the first bytes of a chunk."""
        _transfer(os.preadv, self._memory, target, range_of(chunk)[0])

    def cover(self, chunks: int) -> None:
        """Make room for this many chunks."""
        self._covered.extend(bytes(max(0, chunks - len(self._covered))))

    def give(self) -> int:
        """Return the memory, which becomes the caller's."""
        return self._memory


def _size(chunks: int) -> int:
    """Return the memory for so many chunks."""
    return whole_pages(range_of(chunks - 1)[1])


def _transfer(how: Callable[..., int], fd: int, data: bytearray | memoryview, at: int) -> None:
    if how(fd, [data], at) != len(data):
        raise SnapshotError("a parity's memory ended early")


@dataclass(slots=True)
class _Held:
    parities: dict[Version, Parity] = field(default_factory=dict)
    spares: list[int] = field(default_factory=list)
    owners: dict[Rank, tuple[int, frozenset[Version]]] = field(default_factory=dict)
    """The timeline in which a rank last offered something, and all that its owner had then."""

    def _present(self) -> dict[Rank, frozenset[Version]]:
        """Return what the owners have that offered something in the newest timeline."""
        newest = max((timeline for timeline, _ in self.owners.values()), default=0)
        return {rank: versions for rank, (timeline, versions) in self.owners.items() if timeline == newest}

    def never_whole(self, version: Version) -> bool:
        """Return whether some owner has passed over this version, and has a newer one."""
        return any(
            version not in versions and max(versions, default=version) > version
            for versions in self._present().values()
        )

    def urgency(self, group: Group, version: Version) -> tuple[bool, bool, Version]:
        """Order versions of which one is to become whole next: that which all owners have, else the newest.

        A replaced rank may be ahead: the others capture a newer version only once that of the repair is committed.
        """
        present = self._present()
        everyone = all(version in present.get(rank, ()) for rank in group)
        return not self.never_whole(version), everyone, version


class Parities:
    """The parities of a node. All methods are thread-safe; `lock` is that of the node's copies."""

    def __init__(
        self,
        hasher: Hasher,
        vault: Vault,
        lock: "threading.RLock",
        on_change: Callable[[], None],
        retention: Retention,
    ) -> None:
        """`on_change` is called when they take more or less memory."""
        self._hasher, self._vault, self._on_change, self._retention = hasher, vault, on_change, retention
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._present: dict[Rank, Group] = {}
        self._held: dict[Group, _Held] = {}
        self._short_since: dict[Rank, float] = {}
        """The ranks whose last offer did not fit, and since when."""

    def keep(self, ranks: Collection[Rank], groups: Collection[Group]) -> None:
        """Hold parities of these groups from now on, and older ones only while this node keeps copies of all their ranks."""
        with self._lock:
            self._present = {rank: group for group in groups for rank in group}
            for group in [group for group in self._held if not set(group) <= set(ranks)]:
                for parity in list(self._held[group].parities.values()):
                    self._drop(parity)
                for fd in self._held.pop(group).spares:
                    os.close(fd)
            self._on_change()

    def refusal(self, rank: Rank, group: Group) -> str | None:
        """Return why deliveries to the group's parity are refused; None if they are not."""
        with self._lock:
            return None if self._present.get(rank) == group else "this node does not keep a parity of the rank's group"

    def offered(self, put: Put, version: Version, home: Peer) -> tuple[Parity, ParityPart] | None:
        """Return the parity for a rank's snapshot, and its part, for `ended`. None: another version is under way, or this one will never be whole.

        A version that is not whole is given up for a more urgent one. Raises `NoMemoryError`.
        """
        rank, group = put.rank, put.group
        with self._lock:
            held = self._held.setdefault(group, _Held())
            parity = held.parities.get(version)
            part = None if parity is None else parity.parts.get(rank)
            if parity is not None and (parity.void or (part is not None and part.digests.token != put.token)):
                self._drop(parity)
                parity = part = None
            if part is None or not part.whole:
                partial = [each for each in held.parities.values() if not each.is_whole and each is not parity]
                first = max((held.urgency(group, each.version) for each in partial), default=None)
                if held.never_whole(version) or (first is not None and first > held.urgency(group, version)):
                    return None
                for each in partial:
                    self._drop(each)
            if parity is None:
                parity = held.parities[version] = Parity(group, version, self._memory(held))
            if part is None:
                digests = ChunkDigests(self._hasher, rank, version, put.token, put.nbytes)
                part = parity.parts[rank] = ParityPart(rank, digests, home, put.timeline, bytearray(digests.chunks))
                parity.cover(digests.chunks)
                self._take_room(parity, part, put)
            part.home, part.timeline = home, max(part.timeline, put.timeline)
            parity.users += 1
            self._changed.notify_all()
            return parity, part

    def _take_room(self, parity: Parity, part: ParityPart, put: Put) -> None:
        """Announce the memory for a new part. Raises `NoMemoryError` without room for it, and forgets the part."""
        growth = max(0, _size(part.digests.chunks) - parity.taken)
        while True:
            self._on_change()
            try:
                self._vault.check_room(growth, f"the parity of rank {part.rank}")
            except NoMemoryError:
                if self._give_way(parity, put):
                    continue
                self._short_since.setdefault(part.rank, time.monotonic())
                del parity.parts[part.rank]
                if not parity.parts:
                    self._drop(parity)
                self._on_change()
                raise
            self._short_since.pop(part.rank, None)
            return

    def _give_way(self, parity: Parity, put: Put) -> bool:
        """Free spare memory, or that of a whole parity that the rank's owner does not hold; return whether there was any."""
        spares = [held.spares for group, held in self._held.items() if put.rank in group and held.spares]
        for fds in spares:
            while fds:
                os.close(fds.pop())
        if spares:
            return True
        whole = {
            (each.version, each.parts[put.rank].digests.token): each
            for each in self._of(put.rank)
            if each is not parity and each.is_whole and each.parts[put.rank].timeline <= put.timeline
        }
        first = self._retention.first_to_go(whole.keys(), put.held, self._short_since.get(put.rank))
        if first is not None:
            self._drop(whole[first])
        return first is not None

    def ended(self, parity: Parity, part: ParityPart, *, whole: bool, damaged: bool = False) -> None:
        """Note that a delivery ended: all chunks are here, or the rest comes later; or they are not the owner's."""
        with self._lock:
            part.whole = part.whole or whole
            if damaged:
                parity.void = True
            if parity.void:
                self._drop(parity)
            self.shut(parity)
            self._changed.notify_all()

    def wait_until_held(self, parity: Parity, timeline: int, timeout_s: float) -> bool:
        """Wait until all ranks of the group have delivered their snapshots; False if that takes too long, or never happens."""
        with self._changed:
            self._changed.wait_for(lambda: parity.holds_in(timeline) or not self._is_here(parity), timeout_s)
            return parity.holds_in(timeline) and self._is_here(parity)

    def versions(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, the versions of a rank that can be computed if the others of its group are there."""
        with self._lock:
            return tuple(sorted({parity.version for parity in self._of(rank) if parity.is_whole}))

    def ranks(self) -> set[Rank]:
        """Return the ranks of which there is anything here."""
        with self._lock:
            return {rank for held in self._held.values() for parity in held.parities.values() for rank in parity.parts}

    def trim(self, put: Put) -> list[tuple[Version, bytes]]:
        """Drop parities of snapshots that the owner does not hold and may not need; return the whole ones of its group and timeline."""
        rank, timeline = put.rank, put.timeline
        with self._lock:
            if put.group and self._present.get(rank) == put.group:
                owners = self._held.setdefault(put.group, _Held()).owners
                if timeline >= owners.get(rank, (0, frozenset()))[0]:
                    owners[rank] = timeline, frozenset(version for version, _ in put.held)
            here = {parity: (parity.version, parity.parts[rank].digests.token) for parity in self._of(rank)}
            whole = {identity for parity, identity in here.items() if parity.is_whole}
            kept, left = {*put.held, *self._retention.kept(whole, put.held)}, []
            for parity, identity in here.items():
                if timeline >= parity.parts[rank].timeline and identity not in kept:
                    self._drop(parity)
                elif parity.holds_in(timeline) and parity.group == put.group == self._present.get(rank):
                    left.append(identity)
            self._on_change()
            return sorted(left)

    def discard_above(self, timeline: int, version: Version) -> None:
        """Drop newer versions that have something of an older timeline."""
        self._drop_older(timeline, lambda parity: parity.version > version)

    def renew(self, timeline: int) -> None:
        """Drop everything of older timelines."""
        self._drop_older(timeline, lambda _: True)

    def _drop_older(self, timeline: int, is_void: Callable[[Parity], bool]) -> None:
        with self._lock:
            for held in self._held.values():
                for parity in list(held.parities.values()):
                    if is_void(parity) and any(part.timeline < timeline for part in parity.parts.values()):
                        self._drop(parity)
            self._changed.notify_all()

    def open(self, rank: Rank, version: Version) -> Parity | None:
        """Return the whole parity of this version for `shut`; None if there is none.

        That of the rank's present group comes first: ranks of an older one may have been lost together.
        """
        with self._lock:
            whole = [each for each in self._of(rank) if each.version == version and each.is_whole]
            found = max(whole, key=lambda each: each.group == self._present.get(rank), default=None)
            if found is not None:
                found.users += 1
            return found

    def shut(self, parity: Parity) -> None:
        """End what `open` or `offered` began."""
        with self._lock:
            parity.users -= 1
            if not parity.users and not self._is_here(parity):
                os.close(parity.give())
            self._on_change()

    def memory(self) -> tuple[int, int]:
        """Return how many bytes parities are about to take, and have."""
        with self._lock:
            parities = [parity for held in self._held.values() for parity in held.parities.values()]
            taken = sum(parity.taken for parity in parities)
            spare = sum(os.fstat(fd).st_size for held in self._held.values() for fd in held.spares)
            return sum(max(0, parity.nbytes - parity.taken) for parity in parities), taken + spare

    # --- with the lock held --------------------------------------------------------------------------------------

    def _of(self, rank: Rank) -> Iterator[Parity]:
        for group, held in self._held.items():
            if rank in group:
                yield from (parity for parity in held.parities.values() if rank in parity.parts)

    def _is_here(self, parity: Parity) -> bool:
        held = self._held.get(parity.group)
        return held is not None and held.parities.get(parity.version) is parity

    def _memory(self, held: _Held) -> int:
        return held.spares.pop() if held.spares else create_memory("parity")

    def _drop(self, parity: Parity) -> None:
        """Drop a parity: nobody waits for it any more. Its memory may hold the next one."""
        if not self._is_here(parity):
            return
        held = self._held[parity.group]
        del held.parities[parity.version]
        if not parity.users and len(held.spares) < _MAX_SPARES:
            held.spares.append(parity.give())
        elif not parity.users:
            os.close(parity.give())
        self._changed.notify_all()
