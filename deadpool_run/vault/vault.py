"""The memory that outlives a worker: the node's board and, for each rank that lives here, two slots and a transcript.

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
from deadpool_run.vault.board import BUSY, EMPTY, Board, create_board
from deadpool_run.vault.segments import complete_version, complete_versions


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
        """Return what a worker of this rank needs: `board`, `slot0`, `slot1`, `transcript`."""
        with self._lock:
            own = self._ranks.get(rank)
            if own is None:
                own = self._ranks[rank] = _create(rank)
        return {"board": self._board_fd, "slot0": own.slots[0], "slot1": own.slots[1], "transcript": own.transcript}

    def lives_here(self, rank: Rank) -> bool:
        """Tell whether there is memory of the rank's own, whatever it holds."""
        return rank in self._ranks

    def captured(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, the versions that a rank whose worker is dead has left complete."""
        with self._lock:
            own = self._ranks.get(rank)
            return () if own is None else complete_versions(own.slots, self.board.cells[rank])

    def vacate(self, rank: Rank) -> None:
        """Forget the rank's dead owner, not its snapshots; what it was writing when it died is none."""
        cell = self.board.cells[rank]
        cell.clear(keep_slots=True)
        for slot, version in enumerate(cell.slots):
            if version == BUSY:
                cell.set_slot(slot, EMPTY)

    def borrow(self, rank: Rank) -> Segments | None:
        """Return duplicates, which the caller closes, of the rank's own memory; None if it has none here."""
        with self._lock:
            own = self._ranks.get(rank)
            if own is None:
                return None
            return Segments((os.dup(own.slots[0]), os.dup(own.slots[1])), os.dup(own.transcript))

    def take(self, rank: Rank) -> Segments | None:
        """Let the rank go: return its memory, which becomes the caller's, and show it as empty."""
        with self._lock:
            own = self._ranks.pop(rank, None)
            self.board.cells[rank].clear(keep_slots=False)
            return own

    def put(self, rank: Rank, slots: tuple[int | None, int | None], transcript: int | None) -> None:
        """Give the rank memory that was filled elsewhere, in the place of what it had; None: an empty one."""
        fresh = _create(rank, slots, transcript)
        with self._lock:
            old = self._ranks.pop(rank, None)
            self._ranks[rank] = fresh
            cell = self.board.cells[rank]
            cell.clear(keep_slots=False)
            for slot, fd in enumerate(fresh.slots):
                version = complete_version(fd)
                cell.set_slot(slot, EMPTY if version is None else version)
        if old is not None:
            old.close()

    def renew(self) -> None:
        """Forget everything: fresh memory, so that no straggler of the last generation can reach this one's."""
        self.close()
        self._fill()

    def close(self) -> None:
        """Let go of all of it."""
        with self._lock:
            self.board.close()
            os.close(self._board_fd)
            for own in self._ranks.values():
                own.close()
            self._ranks.clear()

    def _fill(self) -> None:
        with self._lock:
            self._board_fd = create_board(self.world_size)
            self.board = Board(self._board_fd, self.world_size)
            self._ranks: dict[Rank, Segments] = {}


def _create(rank: Rank, slots: tuple[int | None, int | None] = (None, None), transcript: int | None = None) -> Segments:
    def made(name: str, fd: int | None) -> int:
        return os.memfd_create(f"deadpool-{rank}-{name}", os.MFD_CLOEXEC) if fd is None else fd

    return Segments((made("slot0", slots[0]), made("slot1", slots[1])), made("transcript", transcript))
