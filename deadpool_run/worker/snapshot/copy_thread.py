"""The copy thread: takes one capture at a time, waits for a slot that may be overwritten, and has it written."""

import threading
import time
from collections.abc import Callable, Sequence

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import free_slot, mark_empty
from deadpool_run.vault.status_page import BUSY, EMPTY, Copying, RankEntry, StatusPage
from deadpool_run.worker.snapshot.slot_memory import SlotMemory
from deadpool_run.worker.snapshot.writer import StateCapture, Writer

_SLOT_POLL_S = 0.0005
"""A slot becomes free by what peers write on the status page, and a status page cannot wake anyone."""
_SLOT_WAIT_S = 60.0
_PEER_WAIT_S = 5.0
_COPY_WAIT_S = 600.0
"""A bound for a copy that is under way; far above any honest one."""


class CopyThread:
    """One capture at a time, on a thread of its own.

    All methods are the main thread's. `interrupted` is asked on the copy thread.
    """

    def __init__(  # noqa: PLR0913 - what it reads, writes and tells
        self,
        *,
        memories: Sequence[SlotMemory],
        writer: Writer,
        status_page: StatusPage,
        rank: Rank,
        on_skip: Callable[[Version], None],
        on_captured: Callable[[Version], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._memories = memories
        self._writer = writer
        self._status_page = status_page
        self._rank_entry = status_page.rank_entries[rank]
        self._rank_entry.copying = Copying.NOTHING  # what a dead predecessor left
        self._on_skip = on_skip
        self._on_captured = on_captured
        self._interrupted = interrupted
        self._changed = threading.Condition()
        self._capture: StateCapture | None = None
        self._hurried = False
        self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, capture: StateCapture) -> None:
        """Start a capture; the one before must have settled."""
        assert self._capture is None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="deadpool-copy", daemon=True)
            self._thread.start()
        self._rank_entry.copying = Copying.WAITING
        with self._changed:
            self._capture = capture
            self._changed.notify_all()

    def settle(self, *, hurry: bool) -> None:
        """Return when no capture is under way. With `hurry`, one that still waits for a slot is given up.

        Raises what made the last capture fail.
        """
        if self._capture is not None:
            with self._changed:
                self._hurried = hurry and self._capture is not None
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._capture is None, timeout=_COPY_WAIT_S + _SLOT_WAIT_S):
                    raise SnapshotError(f"a capture did not end within {_COPY_WAIT_S:.0f} s")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def settle_peers(self) -> bool:
        """Return when no rank of the node has a capture under way; False if a rank was lost before.

        A rank that stands still is not waited for: who is to blame for a hang is not decided here. Nor is one that waits
        for a slot where the job spans nodes: that takes as long as the network does, and training does not wait for it.
        """
        least = Copying.WRITING if self._status_page.spans_nodes else Copying.WAITING
        return self._wait_while(lambda rank_entry: rank_entry.copying >= least)

    def settle_version(self, version: Version) -> bool:
        """Return when every rank is past this version or has copied it, or stands still; False if one was lost before.

        At once where the job spans nodes: the status page does not tell how far the ranks of others are.
        """
        return self._status_page.spans_nodes or self._wait_while(
            lambda rank_entry: (
                rank_entry.completed < version
                or (rank_entry.completed == version and rank_entry.copying != Copying.NOTHING)
            )
        )

    def _wait_while(self, is_behind: Callable[[RankEntry], bool]) -> bool:
        """Return True when this holds of no rank, or has held of one for too long; False if a rank was lost before."""
        deadline = time.monotonic() + _PEER_WAIT_S
        while any(map(is_behind, self._status_page.rank_entries)):
            if self._interrupted():
                return False
            if time.monotonic() > deadline:
                break
            time.sleep(_SLOT_POLL_S)
        return True

    def close(self) -> None:
        """End the thread after the capture under way."""
        with self._changed:
            self._closing = self._hurried = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_COPY_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._capture is not None or self._closing)
                capture = self._capture
            if capture is None:
                return
            failure: BaseException | None = None
            try:
                self._perform(capture)
            except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
                failure = error
            self._rank_entry.copying = Copying.NOTHING
            with self._changed:
                self._capture, self._hurried, self._failure = None, False, failure
                self._changed.notify_all()

    def _perform(self, capture: StateCapture) -> None:
        slot = self._await_slot()
        if slot is None:
            self._skip(capture.version)
            return
        started_ns = time.monotonic_ns()
        self._rank_entry.copying = Copying.WRITING
        self._rank_entry.set_slot(slot, BUSY)
        written = False
        try:
            written = self._writer.write(self._memories[slot], capture)
        finally:
            if not written:
                mark_empty(self._memories[slot].fd)
                self._rank_entry.set_slot(slot, EMPTY)
        if not written:
            self._skip(capture.version)
            return
        if self._rank_entry.skipped == capture.version:
            self._rank_entry.skipped = EMPTY  # skipped before a rollback, and now made after all
        self._rank_entry.set_slot(slot, capture.version)
        self._rank_entry.capture_ns = time.monotonic_ns() - started_ns
        self._on_captured(capture.version)

    def _await_slot(self) -> int | None:
        deadline = time.monotonic() + _SLOT_WAIT_S
        while True:
            hurried = self._hurried or self._interrupted()  # before the look: whoever gives up has been given one
            slot = free_slot(
                self._rank_entry.slots,
                self._status_page.committed(),
                self._status_page.abandoned(),
                self._status_page.kept,
            )
            if slot is not None:
                return slot
            if hurried or time.monotonic() > deadline:
                return None
            with self._changed:
                if not self._hurried:
                    self._changed.wait(_SLOT_POLL_S)

    def _skip(self, version: Version) -> None:
        self._rank_entry.skipped = version
        self._on_skip(version)
