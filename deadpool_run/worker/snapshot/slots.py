"""The rank's two slots: their memory, and the versions in them, on the status page."""

import os

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.headroom import Growth
from deadpool_run.vault.status_page import EMPTY, StatusPage
from deadpool_run.worker.snapshot.slot_memory import SlotMemory


class Slots:
    """Two slots of one rank. The descriptors are duplicated; the caller keeps its own."""

    def __init__(self, slot_fds: tuple[int, int], status_page: StatusPage, rank: Rank, workers: int) -> None:
        """Take over the slots. One that a dead predecessor left half-written is emptied. `workers` is the number of workers of this node."""
        self._rank_entry = status_page.rank_entries[rank]
        self._rank_entry.taken = sum(os.fstat(fd).st_size for fd in slot_fds)
        self.memories = tuple(SlotMemory(fd, Growth(status_page, rank, workers)) for fd in slot_fds)
        for slot, version in enumerate(self._rank_entry.slots):
            if segments.read_complete(slot_fds[slot], version) is None:
                self._rank_entry.set_slot(slot, EMPTY)
        if self.held():  # a predecessor's: the newest one is mostly what will be restored
            older, newest = sorted(range(2), key=lambda slot: self._rank_entry.slots[slot])
            self.memories[older].map_ahead(after=self.memories[newest].map_ahead())

    def held(self) -> tuple[Version, ...]:
        """Return the complete versions in the slots, oldest first."""
        return self._rank_entry.held

    def memory_of(self, version: Version) -> SlotMemory:
        """Return the memory that has this version. Raises `SnapshotError`."""
        for slot, held in enumerate(self._rank_entry.slots):
            if held == version:
                return self.memories[slot]
        raise SnapshotError(f"no slot holds snapshot {version}: the slots hold {list(self.held())}")

    def discard_newer(self, version: Version) -> None:
        """Empty the slots with a newer version, and forget a skip of a newer version."""
        for slot, held in enumerate(self._rank_entry.slots):
            if held > version:
                self._rank_entry.set_slot(slot, EMPTY)
                segments.mark_empty(self.memories[slot].fd)
        if self._rank_entry.skipped > version:
            self._rank_entry.skipped = EMPTY

    def close(self) -> None:
        """Free memory and descriptors; the slots keep their content."""
        for memory in self.memories:
            memory.close()
