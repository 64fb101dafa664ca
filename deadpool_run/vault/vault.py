"""The memory that outlives a worker: the node's status page and, for each rank that lives here, two slots and a transcript.

All are memfds that this process holds and hands to the rank's workers; they take no name and no disk, and are gone with
their last holder. A rank's are made when they are first asked for, and a slot is empty until its worker gives it a size.
Other threads read slots to send them elsewhere; they are given duplicates, so that none can be closed under them.
"""

import os
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import (
    SegmentState,
    blob_bytes,
    complete_version,
    complete_versions,
    create_memory,
    identity,
    read_identified,
)
from deadpool_run.vault.status_page import BUSY, EMPTY, StatusPage, create_status_page


@dataclass(frozen=True, slots=True)
class Held:
    """One snapshot that a slot holds complete. `token` tells its content from any other; `nbytes` is its size."""

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
        """Let go of them."""
        for fd in (*self.slots, self.transcript):
            os.close(fd)


class Vault:
    """Holder of one generation's memory at a time. Descriptors stay the vault's: duplicate what you give away."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.Lock()
        self._fill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def descriptors(self, rank: Rank) -> dict[str, int]:
        """Return what a worker of this rank needs: `status_page`, `slot0`, `slot1`, `transcript`."""
        with self._lock:
            own = self._ranks.get(rank)
            if own is None:
                own = self._ranks[rank] = _create(rank)
        return {
            "status_page": self._status_page_fd,
            "slot0": own.slots[0],
            "slot1": own.slots[1],
            "transcript": own.transcript,
        }

    @property
    def status_page_fd(self) -> int:
        """The status page's descriptor."""
        return self._status_page_fd

    def lives_here(self, rank: Rank) -> bool:
        """Tell whether there is memory of the rank's own, whatever it holds."""
        return rank in self._ranks

    def ranks(self) -> list[Rank]:
        """Return the ranks that live here."""
        with self._lock:
            return sorted(self._ranks)

    def is_past(self, rank: Rank, version: Version) -> bool:
        """Tell whether the rank holds this version or a newer one, or will never hold it; so does one that holds nothing."""
        with self._lock:
            if rank not in self._ranks:
                return True
            rank_entry = self.status_page.rank_entries[rank]
            return max(*rank_entry.slots, rank_entry.skipped) >= version or all(
                held == EMPTY for held in rank_entry.slots
            )

    def captured(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, the versions that a rank whose worker is dead has left complete."""
        with self._lock:
            own = self._ranks.get(rank)
            return () if own is None else complete_versions(own.slots, self.status_page.rank_entries[rank])

    def vacate(self, rank: Rank) -> None:
        """Forget the rank's dead owner, not its snapshots; what it was writing when it died is none."""
        rank_entry = self.status_page.rank_entries[rank]
        rank_entry.clear(keep_slots=True)
        for slot, version in enumerate(rank_entry.slots):
            if version == BUSY:
                rank_entry.set_slot(slot, EMPTY)

    def held(self, rank: Rank) -> tuple[Held, ...]:
        """Return what the rank's own slots hold complete, oldest first."""
        with self._lock:
            return self._held(rank)

    def open(self, rank: Rank, held: Held) -> int | None:
        """Return a duplicate, which the caller closes, of the slot that holds this; None if none does any more."""
        with self._lock:
            if held not in self._held(rank):
                return None
            return os.dup(self._ranks[rank].slots[held.slot])

    def open_slot(self, rank: Rank, slot: int) -> int | None:
        """Return a duplicate, which the caller closes, of a slot, whatever it holds; None if the rank is not here."""
        with self._lock:
            own = self._ranks.get(rank)
            return None if own is None else os.dup(own.slots[slot])

    def still(self, rank: Rank, held: Held) -> bool:
        """Tell whether the slot has not been touched since it was found to hold this."""
        with self._lock:
            own = self._ranks.get(rank)
            return (
                own is not None
                and self.status_page.rank_entries[rank].slots[held.slot] == held.version
                and identity(own.slots[held.slot]) == held.token
            )

    def open_transcript(self, rank: Rank) -> int | None:
        """Return a duplicate, which the caller closes, of the rank's transcript; None if it has none complete here."""
        with self._lock:
            own = self._ranks.get(rank)
            if own is None or blob_bytes(own.transcript) is None:
                return None
            return os.dup(own.transcript)

    def has_transcript(self, rank: Rank) -> bool:
        """Tell whether the rank's transcript is complete here."""
        with self._lock:
            own = self._ranks.get(rank)
            return own is not None and blob_bytes(own.transcript) is not None

    def set_slot(self, rank: Rank, slot: int, fd: int, version: int) -> None:
        """Say on the status page what a slot of the rank holds, which has no worker now or one that waits for this.

        `fd` is of the slot; if the rank has other memory by now, nothing is said.
        """
        with self._lock:
            own = self._ranks.get(rank)
            if own is not None and os.path.samestat(os.fstat(own.slots[slot]), os.fstat(fd)):
                self.status_page.rank_entries[rank].set_slot(slot, version)

    def committed(self) -> Version | None:
        """Return what the status page says is committed; None if it is closed."""
        with self._lock:
            return self.status_page.committed() if self._ranks else None

    def take(self, rank: Rank) -> Segments | None:
        """Let the rank go: return its memory, which becomes the caller's, and show it as empty."""
        with self._lock:
            own = self._ranks.pop(rank, None)
            self.status_page.rank_entries[rank].clear(keep_slots=False)
            return own

    def put(self, rank: Rank, slots: tuple[int | None, int | None], transcript: int | None) -> None:
        """Give the rank memory that was filled elsewhere, in the place of what it had; None: an empty one."""
        fresh = _create(rank, slots, transcript)
        with self._lock:
            old = self._ranks.pop(rank, None)
            self._ranks[rank] = fresh
            rank_entry = self.status_page.rank_entries[rank]
            rank_entry.clear(keep_slots=False)
            for slot, fd in enumerate(fresh.slots):
                version = complete_version(fd)
                rank_entry.set_slot(slot, EMPTY if version is None else version)
        if old is not None:
            old.close()

    def renew(self) -> None:
        """Forget everything: fresh memory, so that no straggler of the last generation can reach this one's."""
        self.close()
        self._fill()

    def close(self) -> None:
        """Let go of all of it."""
        with self._lock:
            self.status_page.close()
            os.close(self._status_page_fd)
            for own in self._ranks.values():
                own.close()
            self._ranks.clear()

    def _held(self, rank: Rank) -> tuple[Held, ...]:
        own = self._ranks.get(rank)
        found = []
        for slot, said in enumerate(self.status_page.rank_entries[rank].slots if own is not None else ()):
            assert own is not None
            header, token = read_identified(own.slots[slot])
            if said >= 0 and header is not None and header.state is SegmentState.COMPLETE and header.version == said:
                found.append(Held(Version(said), token, header.used_bytes, slot))
        return tuple(sorted(found, key=lambda held: held.version))

    def _fill(self) -> None:
        with self._lock:
            self._status_page_fd = create_status_page(self.world_size)
            self.status_page = StatusPage(self._status_page_fd, self.world_size)
            self._ranks: dict[Rank, Segments] = {}


def _create(rank: Rank, slots: tuple[int | None, int | None] = (None, None), transcript: int | None = None) -> Segments:
    def made(name: str, fd: int | None) -> int:
        return create_memory(f"{rank}-{name}") if fd is None else fd

    return Segments((made("slot0", slots[0]), made("slot1", slots[1])), made("transcript", transcript))
