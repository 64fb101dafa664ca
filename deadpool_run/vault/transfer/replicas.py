"""Copies of snapshots and transcripts of ranks that live on other nodes.

A complete copy is never overwritten: a new one is received into separate memory, and added when it is complete. So each
rank has memory for two copies and a spare, which rotate. All methods are thread-safe. `parities` takes the place of the
snapshots' copies, not of the transcripts', for ranks that share one.
"""

import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from deadpool_run.core.copies.parity_groups import Group
from deadpool_run.errors import NoMemoryError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import blob_header, create_memory
from deadpool_run.vault.transfer.chunks import ChunkDigests, Hasher
from deadpool_run.vault.transfer.memory import Memory
from deadpool_run.vault.transfer.parity import Parities
from deadpool_run.vault.transfer.retention import Retention
from deadpool_run.vault.vault import Held, Segments, Vault

Token = bytes
TRANSCRIPT = None
"""In place of a version: the rank's transcript."""
_MAX_SPARES = 1


@dataclass(slots=True)
class Copy:
    """A complete copy. `timeline` is the one in which its owner sent it.

    `left_behind`: no owner sent it. The rank lived here before, and may have newer versions elsewhere.
    """

    version: Version | None
    digests: ChunkDigests
    timeline: int
    memory: Memory
    readers: int = 0
    left_behind: bool = False

    @property
    def token(self) -> Token:
        """Identifies the content."""
        return self.digests.token

    def is_as_received(self) -> bool:
        """Return whether the memory still fits the keyed digests that came with it."""
        with self.memory.view(self.digests.nbytes) as view:
            return self.digests.fit(view)


@dataclass(slots=True)
class _Rank:
    copies: dict[Version | None, Copy] = field(default_factory=dict)
    spares: list[Memory] = field(default_factory=list)
    timeline: int = 0

    def memories(self) -> list[Memory]:
        return [*(copy.memory for copy in self.copies.values()), *self.spares]

    def snapshots(self) -> dict[Version, Copy]:
        return {version: copy for version, copy in self.copies.items() if version is not TRANSCRIPT}


class Replicas:
    """The copies of a node."""

    def __init__(self, hasher: Hasher, vault: Vault) -> None:
        self._hasher = hasher
        self._vault = vault
        self._receiving: dict[Memory, tuple[int, int]] = {}
        """Of each memory that is being received into: what it took before, and what it takes more."""
        self._short_since: dict[Rank, float] = {}
        """The ranks of which the last copy that was offered did not fit, and since when."""
        self._lock = threading.RLock()
        self._ranks: dict[Rank, _Rank] = {}
        self._kept: frozenset[Rank] = frozenset()
        self._timeline = 0
        self.retention = Retention()
        self.parities = Parities(hasher, vault, self._lock, self._announce, self.retention)

    # --- for the loop --------------------------------------------------------------------------------------------

    def keep(self, ranks: Collection[Rank], groups: Collection[Group] = ()) -> None:
        """Hold copies of only these ranks from now on, or parities of these groups."""
        with self._lock:
            self._kept = frozenset(ranks)
            self.parities.keep(ranks, groups)
            self._short_since = {rank: since for rank, since in self._short_since.items() if rank in self._kept}
            for rank in self._ranks.keys() - self._kept:
                self.drop(rank)

    def discard_above(self, timeline: int, version: Version) -> None:
        """Drop newer versions of older timelines, and refuse later deliveries of older timelines."""
        with self._lock:
            self._timeline = timeline
            self.retention.discard_above(version)
            for own in self._ranks.values():
                self._free_older(own, timeline, {each for each in own.snapshots() if each > version})
            self.parities.discard_above(timeline, version)
            self._announce()

    def renew(self, timeline: int) -> None:
        """Drop everything of older timelines."""
        with self._lock:
            self._timeline = timeline
            self.retention.renew()
            for rank, own in list(self._ranks.items()):
                self._free_older(own, timeline, set(own.copies))
                if not own.copies:
                    self.drop(rank)
            self.parities.renew(timeline)
            self._announce()

    def snapshots(self, rank: Rank) -> set[Version]:
        """Return the versions of a rank, as copies or in parities."""
        with self._lock:
            return {*self._ranks.get(rank, _Rank()).snapshots(), *self.parities.versions(rank)}

    def versions(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, the versions of a rank; none without its transcript."""
        with self._lock:
            return () if self._copy(rank, TRANSCRIPT) is None else tuple(sorted(self.snapshots(rank)))

    def ranks(self) -> set[Rank]:
        """Return the ranks of which there are copies, whole or not, or parts of a parity."""
        with self._lock:
            return {*self._ranks, *self.parities.ranks()}

    def held(self) -> dict[Rank, tuple[Version, ...]]:
        """Return the versions of each rank of which there are copies, with a transcript or without."""
        with self._lock:
            return {rank: tuple(own.snapshots()) for rank, own in self._ranks.items()}

    def drop(self, rank: Rank) -> None:
        """Drop all copies of the rank."""
        with self._lock:
            own = self._ranks.pop(rank, _Rank())
            for memory in own.memories():
                memory.close()
            self._announce()

    def move_to(self, vault: Vault, rank: Rank, *, left: bool = True) -> bool:
        """Turn the copies of a rank into its own memory here; False without a snapshot and an undamaged transcript.

        The rank has room for the two newest; older ones stay copies. A snapshot that a parity has counts, and is computed
        when its version is wanted. Without `left`, the rank's own old snapshots do not count.
        """
        with self._lock:
            own = self._ranks.get(rank, _Rank())
            newest = sorted((v for v, copy in own.snapshots().items() if left or not copy.left_behind), reverse=True)
            if TRANSCRIPT not in own.copies or not (newest or self.parities.versions(rank)):
                return False
            if not own.copies[TRANSCRIPT].is_as_received():  # torch unpickles objects in it
                self._free(own, own.copies.pop(TRANSCRIPT))
                return False
            transcript = own.copies.pop(TRANSCRIPT).memory.give()
            fds = [own.copies.pop(version).memory.give() for version in newest[:2]]
            older: dict[Version | None, Copy] = {version: own.copies.pop(version) for version in newest[2:]}
            self.drop(rank)
            self._ranks |= {rank: _Rank(older, timeline=own.timeline)} if older else {}
            self._announce()
            vault.put(rank, fds, transcript)  # a copy that is on its way is refused from now on
        return True

    def take_over(self, rank: Rank, timeline: int, segments: Segments, held: Collection[Held]) -> None:
        """Hold the segments of a rank that moved to another node, until it is no longer kept."""
        parts = {each.slot: each for each in held}
        with self._lock:
            own = self._ranks.setdefault(rank, _Rank())
            own.timeline = max(own.timeline, timeline)
            for slot, fd in enumerate(segments.slots):
                if slot in parts:
                    part = parts[slot]
                    digests = ChunkDigests(self._hasher, rank, part.version, part.token, part.nbytes)
                    self._add(own, Copy(part.version, digests, timeline, Memory(fd), left_behind=True))
                else:
                    os.close(fd)
            header = blob_header(segments.transcript)
            if header is None:
                os.close(segments.transcript)
            else:
                nbytes, token = header
                digests = ChunkDigests(self._hasher, rank, TRANSCRIPT, token, nbytes)
                self._add(own, Copy(TRANSCRIPT, digests, timeline, Memory(segments.transcript)))
            self._announce()

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept = frozenset()
            for rank in list(self._ranks):
                self.drop(rank)
            self.parities.keep((), ())

    # --- for receivers -------------------------------------------------------------------------------------------

    def refusal(self, rank: Rank, timeline: int) -> str | None:
        """Return why deliveries of the rank in this timeline are refused; None if they are not."""
        with self._lock:
            if self._vault.lives_here(rank):
                return "the rank lives on this node"
            if rank not in self._kept:
                return "this node does not keep copies of the rank"
            newest = max(self._timeline, self._ranks.get(rank, _Rank()).timeline)
            return f"timeline {timeline} is older than {newest}" if timeline < newest else None

    def without_memory(self) -> int:
        """Return for how many ranks a copy was refused for lack of memory, the last time that one was offered."""
        with self._lock:
            return len(self._short_since)

    def give_way(self, rank: Rank, timeline: int, held: Collection[tuple[Version, Token]]) -> bool:
        """Drop one copy, which the owner does not hold, for the memory of the next one; return whether there was one."""
        with self._lock:
            own = self._ranks.get(rank, _Rank())
            kept = [(version, copy.token) for version, copy in own.snapshots().items()]
            first = self.retention.first_to_go(kept, held, self._short_since.get(rank))
            if first is None or timeline < own.timeline:
                return False
            self._free(own, own.copies.pop(first[0]))
            self._announce()
            return True

    def is_short(self, rank: Rank) -> bool:
        """Return whether there was no memory for the rank's last copy that was offered."""
        with self._lock:
            return rank in self._short_since

    def spare(self, rank: Rank, version: Version | None, nbytes: int) -> Memory:
        """Return memory to receive this many bytes into; the caller owns it until `add` or `put_back`.

        Raises `NoMemoryError` without room for it.
        """
        with self._lock:
            own = self._ranks.get(rank)
            spares = [] if own is None or version is TRANSCRIPT else own.spares
            is_new = not spares
            memory = Memory(create_memory(f"{rank}-copy")) if is_new else spares.pop()
            growth = memory.growth(nbytes)
            self._receiving[memory] = memory.taken, growth
            self._announce()
            try:
                self._vault.check_room(growth, f"a copy of rank {rank}")
            except NoMemoryError:
                del self._receiving[memory]
                if is_new:
                    memory.close()
                else:
                    spares.append(memory)
                self._announce()
                self._short_since.setdefault(rank, time.monotonic())
                raise
            self._short_since.pop(rank, None)
            return memory

    def put_back(self, rank: Rank, memory: Memory) -> None:
        """Return memory in which nothing complete arrived."""
        with self._lock:
            self._receiving.pop(memory, None)
            own = self._ranks.get(rank)
            if own is None:
                memory.close()
            else:
                self._spare(own, memory)
            self._announce()

    def has(self, rank: Rank, version: Version | None, token: Token, timeline: int) -> bool:
        """Return whether this content is here; it then belongs to this timeline, too."""
        with self._lock:
            copy = self._copy(rank, version)
            if copy is None or copy.token != token:
                return False
            own = self._ranks[rank]
            copy.timeline = own.timeline = max(own.timeline, timeline)
            copy.left_behind = False
            return True

    def add(self, rank: Rank, copy: Copy) -> str | None:
        """Add a complete copy. Or free it, and return why it is refused by now."""
        with self._lock:
            self._receiving.pop(copy.memory, None)
            refusal = self.refusal(rank, copy.timeline)
            if refusal is None:
                own = self._ranks.setdefault(rank, _Rank())
                own.timeline = copy.timeline
                self._add(own, copy)
            else:
                copy.memory.close()
            self._announce()
            return refusal

    def trim(self, rank: Rank, timeline: int, held: Collection[tuple[Version, Token]]) -> list[tuple[Version, Token]]:
        """Drop copies that the owner does not hold and may not need, unless a newer timeline is known; return the rest."""
        with self._lock:
            own = self._ranks.get(rank, _Rank())
            here = {(version, copy.token) for version, copy in own.snapshots().items()}
            left = self.retention.kept(here, held) if timeline >= own.timeline else here
            for version, _ in here - left:
                self._free(own, own.copies.pop(version))
            self._announce()
            return sorted(left)

    def transcript(self, rank: Rank) -> Token | None:
        """Return the token of the rank's transcript, if it is here."""
        with self._lock:
            copy = self._copy(rank, TRANSCRIPT)
            return None if copy is None else copy.token

    # --- for senders ---------------------------------------------------------------------------------------------

    def open(self, rank: Rank, version: Version | None) -> tuple[Copy, int] | None:
        """Return a copy and a descriptor to read it, both for `shut`; None if it is not here."""
        with self._lock:
            copy = self._copy(rank, version)
            if copy is None:
                return None
            fd = os.dup(copy.memory.fd)
            copy.readers += 1
            return copy, fd

    def still(self, rank: Rank, copy: Copy) -> bool:
        """Return whether the copy is still held."""
        with self._lock:
            return self._copy(rank, copy.version) is copy

    def shut(self, copy: Copy, fd: int) -> None:
        """Close a reader's descriptor."""
        os.close(fd)
        with self._lock:
            copy.readers -= 1

    # --- with the lock held --------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Publish what copies are about to take, and have."""
        growing = sum(more for _, more in self._receiving.values())
        taken = sum(before for before, _ in self._receiving.values())
        for own in self._ranks.values():
            taken += sum(memory.taken for memory in own.memories())
        more, have = self.parities.memory()
        growing, taken = growing + more, taken + have
        self._vault.announce_copies(growing, taken)

    def _copy(self, rank: Rank, version: Version | None) -> Copy | None:
        return self._ranks.get(rank, _Rank()).copies.get(version)

    def _add(self, own: _Rank, copy: Copy) -> None:
        old = own.copies.pop(copy.version, None)
        own.copies[copy.version] = copy
        if old is not None:
            self._free(own, old)

    def _free_older(self, own: _Rank, timeline: int, versions: Collection[Version | None]) -> None:
        """Free those of these versions that came in an older timeline."""
        for version in versions:
            if own.copies[version].timeline < timeline:
                self._free(own, own.copies.pop(version))

    def _free(self, own: _Rank, copy: Copy) -> None:
        """Reuse a copy's memory, unless a reader still uses it."""
        if copy.readers or copy.version is TRANSCRIPT:
            copy.memory.close()
        else:
            self._spare(own, copy.memory)

    def _spare(self, own: _Rank, memory: Memory) -> None:
        if len(own.spares) < _MAX_SPARES:
            own.spares.append(memory)
        else:
            memory.close()
