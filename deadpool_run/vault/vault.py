"""The node's memory that outlives workers: the status page and, for each rank here, two slots and a transcript.

All are memfds that this process holds and passes to the rank's workers; they have no path, use no disk, and disappear with
their last holder. A rank's segments are created on first use, and a slot is empty until its worker sizes it. Threads that
send slots to other nodes get duplicates, so that no descriptor is closed while it is in use.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.headroom import check_room
from deadpool_run.vault.segments import blob_header, complete_version, create_memory, read_complete, slot_token
from deadpool_run.vault.status_page import BUSY, EMPTY, StatusPage, create_status_page


@dataclass(frozen=True, slots=True)
class Held:
    """A complete snapshot in a slot. `token` identifies its content; `nbytes` is its size."""

    version: Version
    token: bytes
    nbytes: int
    slot: int


@dataclass(frozen=True, slots=True)
class Segments:
    """One rank's memory files, as descriptors."""

    slots: tuple[int, int]
    transcript: int

    def close(self) -> None:
        """Close them."""
        for fd in (*self.slots, self.transcript):
            os.close(fd)


class Vault:
    """Holds the memory of one generation at a time, and owns the descriptors."""

    def __init__(self, world_size: int, memory_limit: int = 0) -> None:
        """`memory_limit`: the most bytes that snapshots and copies may take here; 0: as many as there are."""
        self.world_size = world_size
        self._memory_limit = memory_limit
        self._lock = threading.RLock()
        self._fill()

    def descriptors(self, rank: Rank) -> dict[str, int]:
        """Return the descriptors for a worker of this rank: `status_page`, `slot0`, `slot1`, `transcript`."""
        with self._lock:
            own = self._ranks.get(rank)
            if own is None:
                own = self._ranks[rank] = _create(rank)
        return {
            "status_page": self.status_page_fd,
            "slot0": own.slots[0],
            "slot1": own.slots[1],
            "transcript": own.transcript,
        }

    def lives_here(self, rank: Rank) -> bool:
        """Return whether the rank has memory here, whatever it holds."""
        return rank in self._ranks

    def ranks(self) -> list[Rank]:
        """Return the ranks that live here."""
        with self._lock:
            return sorted(self._ranks)

    def is_past(self, rank: Rank, version: Version) -> bool:
        """Return whether the rank holds this version or a newer one, will never hold it, or holds nothing."""
        with self._lock:
            if rank not in self._ranks:
                return True
            rank_entry = self.status_page.rank_entries[rank]
            return max(*rank_entry.slots, rank_entry.skipped) >= version or rank_entry.slots == (EMPTY, EMPTY)

    def captured(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, the complete versions of a rank whose worker is dead."""
        return tuple(held.version for held in self.held(rank))

    def vacate(self, rank: Rank) -> None:
        """Reset the entry of a dead worker, but keep its complete snapshots."""
        rank_entry = self.status_page.rank_entries[rank]
        rank_entry.clear(keep_slots=True)
        for slot, version in enumerate(rank_entry.slots):
            if version == BUSY:
                rank_entry.set_slot(slot, EMPTY)

    def held(self, rank: Rank) -> tuple[Held, ...]:
        """Return the complete snapshots in the rank's slots, oldest first."""
        with self._lock:
            own = self._ranks.get(rank)
            if own is None:
                return ()
            found = []
            for slot, version in enumerate(self.status_page.rank_entries[rank].slots):
                header = read_complete(own.slots[slot], version)
                if version >= 0 and header is not None:
                    found.append(Held(Version(version), header.token, header.used_bytes, slot))
            return tuple(sorted(found, key=lambda held: held.version))

    def open(self, rank: Rank, held: Held) -> int | None:
        """Return a duplicate, which the caller closes, of the slot with this snapshot; None if it has gone."""
        with self._lock:
            return os.dup(self._ranks[rank].slots[held.slot]) if held in self.held(rank) else None

    def open_slots(self, rank: Rank) -> list[int] | None:
        """Return duplicates, which the caller closes, of the rank's slots; None if the rank is not here."""
        with self._lock:
            own = self._ranks.get(rank)
            return None if own is None else list(map(os.dup, own.slots))

    def still(self, rank: Rank, held: Held) -> bool:
        """Return whether the slot still holds this snapshot."""
        with self._lock:
            own = self._ranks.get(rank)
            return (
                own is not None
                and self.status_page.rank_entries[rank].slots[held.slot] == held.version
                and slot_token(own.slots[held.slot]) == held.token
            )

    def open_transcript(self, rank: Rank) -> int | None:
        """Return a duplicate, which the caller closes, of the rank's transcript; None if the rank is not here."""
        with self._lock:
            own = self._ranks.get(rank)
            return None if own is None else os.dup(own.transcript)

    def has_transcript(self, rank: Rank) -> bool:
        """Return whether the rank's transcript is complete here."""
        with self._lock:
            own = self._ranks.get(rank)
            return own is not None and blob_header(own.transcript) is not None

    def set_slot(self, rank: Rank, slot: int, fd: int, version: int) -> None:
        """Publish what a slot holds, for a rank without a worker, or whose worker waits for this.

        `fd` is the slot's descriptor; nothing is published if the rank has other memory by now.
        """
        with self._lock:
            own = self._ranks.get(rank)
            if own is not None and os.path.samestat(os.fstat(own.slots[slot]), os.fstat(fd)):
                self.status_page.rank_entries[rank].set_slot(slot, version)

    def committed(self) -> Version | None:
        """Return the committed version; None if there is none, or after `close`."""
        with self._lock:
            return self.status_page.committed() if self._is_open else None

    def take(self, rank: Rank) -> Segments | None:
        """Remove the rank: return its memory, which becomes the caller's, and publish it as empty."""
        with self._lock:
            own = self._ranks.pop(rank, None)
            self.status_page.rank_entries[rank].clear(keep_slots=False)
            return own

    def put(self, rank: Rank, slots: Sequence[int], transcript: int) -> None:
        """Replace the rank's memory with a transcript and up to two slots that were filled elsewhere."""
        new = _create(rank, slots, transcript)
        with self._lock:
            old = self._ranks.pop(rank, None)
            self._ranks[rank] = new
            rank_entry = self.status_page.rank_entries[rank]
            rank_entry.clear(keep_slots=False)
            rank_entry.taken = sum(os.fstat(fd).st_size for fd in new.slots)
            for slot, fd in enumerate(new.slots):
                version = complete_version(fd)
                rank_entry.set_slot(slot, EMPTY if version is None else version)
        if old is not None:
            old.close()

    def announce_copies(self, growing: int, taken: int) -> None:
        """Publish how many bytes copies here are about to take, and have."""
        with self._lock:
            if self._is_open:
                self.status_page.copies_growing, self.status_page.copies_taken = growing, taken

    def check_room(self, nbytes: int, what: str) -> None:
        """Raise `NoMemoryError` without room for a copy of this many bytes, which has been announced."""
        with self._lock:
            if self._is_open:
                check_room(nbytes, self.status_page, len(self._ranks), what, own=nbytes)

    def renew(self) -> None:
        """Replace all memory, so that no late worker of the last generation can write into this one's."""
        self.close()
        self._fill()

    def close(self) -> None:
        """Close everything."""
        with self._lock:
            self._is_open = False
            self.status_page.close()
            os.close(self.status_page_fd)
            for own in self._ranks.values():
                own.close()
            self._ranks.clear()

    def _fill(self) -> None:
        with self._lock:
            self.status_page_fd = create_status_page(self.world_size)
            self.status_page = StatusPage(self.status_page_fd, self.world_size)
            self.status_page.memory_limit = self._memory_limit
            self._ranks: dict[Rank, Segments] = {}
            self._is_open = True


def _create(rank: Rank, slots: Sequence[int] = (), transcript: int | None = None) -> Segments:
    """Return these segments, with new ones in place of those that are missing."""
    slot0, slot1 = (*slots, *(create_memory(f"{rank}-slot{slot}") for slot in range(len(slots), 2)))
    return Segments((slot0, slot1), create_memory(f"{rank}-transcript") if transcript is None else transcript)
