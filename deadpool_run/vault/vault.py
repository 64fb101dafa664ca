"""The memory that outlives a worker: the node's board and, for each rank, two snapshot slots and a transcript.

All are memfds that this process holds and hands to the rank's workers; they take no name and no disk, and are gone with
their last holder. A slot is empty until its worker gives it a size.
"""

import os
from types import TracebackType
from typing import Self

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.board import BUSY, EMPTY, Board, create_board
from deadpool_run.vault.segments import complete_versions

_NAMES = ("slot0", "slot1", "transcript")


class Vault:
    """Holder of one generation's memory at a time. Descriptors stay the vault's: duplicate what you give away."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._fill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def descriptors(self, rank: Rank) -> dict[str, int]:
        """Return what a worker of this rank needs: `board`, `slot0`, `slot1`, `transcript`."""
        return {"board": self._board_fd, **self._ranks[rank]}

    def captured(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, the versions that a rank whose worker is dead has left complete."""
        fds = self._ranks[rank]
        return complete_versions((fds["slot0"], fds["slot1"]), self.board.cells[rank])

    def vacate(self, rank: Rank) -> None:
        """Forget the rank's dead owner, not its snapshots; what it was writing when it died is none."""
        cell = self.board.cells[rank]
        cell.clear(keep_slots=True)
        for slot, version in enumerate(cell.slots):
            if version == BUSY:
                cell.set_slot(slot, EMPTY)

    def renew(self) -> None:
        """Forget everything: fresh memory, so that no straggler of the last generation can reach this one's."""
        self.close()
        self._fill()

    def close(self) -> None:
        """Let go of all of it."""
        self.board.close()
        os.close(self._board_fd)
        for fds in self._ranks:
            for fd in fds.values():
                os.close(fd)

    def _fill(self) -> None:
        self._board_fd = create_board(self._world_size)
        self.board = Board(self._board_fd, self._world_size)
        self._ranks = [
            {name: os.memfd_create(f"deadpool-{rank}-{name}", os.MFD_CLOEXEC) for name in _NAMES}
            for rank in range(self._world_size)
        ]
