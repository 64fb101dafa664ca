"""The copy thread: waits until a slot may be overwritten, and writes one capture at a time into it. Small ones need no thread."""

import threading
import time
from collections.abc import Callable, Sequence

from deadpool_run.errors import NoMemoryError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import free_slot, mark_empty
from deadpool_run.vault.status_page import BUSY, EMPTY, Copying, RankEntry, StatusPage
from deadpool_run.worker.snapshot.slot_memory import SlotMemory
from deadpool_run.worker.snapshot.writer import StateCapture, Writer
from deadpool_run.worker.state.protected import Protected

_SLOT_POLL_S = 0.0005
"""A slot becomes free when peers write to the status page, which cannot wake a thread."""
_SLOT_WAIT_S = 60.0
_PEER_WAIT_S = 5.0
_COPY_WAIT_S = 600.0
"""The longest wait for a running copy; far above any real one."""
_SMALL_BYTES = 4 << 20
"""A smaller state is copied in half a millisecond."""


OnSkip = Callable[[Version, str], None]
"""Called with a version that is not captured, and why, if there is no memory for it."""


class CopyThread:
    """Writes captures, one at a time, on its own thread.

    The methods are for the main thread. `interrupted` is called on the copy thread.
    """

    def __init__(  # noqa: PLR0913 - memory, status page and callbacks
        self,
        *,
        memories: Sequence[SlotMemory],
        protected: Protected,
        status_page: StatusPage,
        rank: Rank,
        on_skip: OnSkip,
        on_captured: Callable[[Version], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._memories = memories
        self._writer = Writer(protected, rank, interrupted)
        self._status_page = status_page
        self._rank_entry = status_page.rank_entries[rank]
        self._rank_entry.copying = Copying.NOTHING  # a dead predecessor may have left another value
        self._on_skip = on_skip
        self._on_captured = on_captured
        self._interrupted = interrupted
        self._changed = threading.Condition()
        self._capture: StateCapture | None = None
        self._cancel_pending = False
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="deadpool-copy", daemon=True)
        self._thread.start()

    def submit(self, capture: StateCapture) -> None:
        """Start a capture; the last one must have settled.

        A small one is made at once, on the calling thread, if a slot is free: the copy takes less time than the threads would take from each other.
        """
        assert self._capture is None
        needs_device = bool(capture.ready.events) or capture.mark is not None
        is_small = 0 < self._writer.last_bytes <= _SMALL_BYTES and not needs_device
        if is_small and (slot := self._free_slot()) is not None:
            self._write_now(slot, capture)
            return
        self._rank_entry.copying = Copying.WAITING
        with self._changed:
            self._capture = capture
            self._changed.notify_all()

    def _write_now(self, slot: int, capture: StateCapture) -> None:
        try:
            self._write(slot, capture)
        except Exception as error:  # noqa: BLE001 - raised when this capture is waited for, as one of the thread
            self._failure = error
        finally:
            self._rank_entry.copying = Copying.NOTHING

    def settle(self, *, cancel_pending: bool) -> None:
        """Wait for the running capture. With `cancel_pending`, cancel one that still waits for a slot.

        Raises the error that made the last capture fail.
        """
        if self._capture is not None:
            with self._changed:
                self._cancel_pending = cancel_pending and self._capture is not None
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._capture is None, timeout=_COPY_WAIT_S + _SLOT_WAIT_S):
                    raise SnapshotError(
                        f"a capture did not end within {_COPY_WAIT_S + _SLOT_WAIT_S:.0f} s\n"
                        "the machine may be overloaded or swap: see `deadpool-run status`"
                    )
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def settle_peers(self) -> bool:
        """Wait until no rank of the node has a running capture; False if a rank was lost.

        The wait for a rank that makes no progress is bounded: hangs are not detected here. If the job spans nodes, a rank
        that waits for a slot is ignored, because training does not wait for the network.
        """
        least = Copying.WRITING if self._status_page.spans_nodes else Copying.WAITING
        return self._wait_while(lambda rank_entry: rank_entry.copying >= least)

    def settle_version(self, version: Version) -> bool:
        """Wait until every rank has copied this version or is past it; False if a rank was lost.

        The wait for a rank that makes no progress is bounded. Returns at once if the job spans nodes: the status page does
        not have the progress of other nodes' ranks.
        """
        return self._status_page.spans_nodes or self._wait_while(
            lambda rank_entry: (
                rank_entry.completed < version
                or (rank_entry.completed == version and rank_entry.copying != Copying.NOTHING)
            )
        )

    def _wait_while(self, is_behind: Callable[[RankEntry], bool]) -> bool:
        """Wait, for a limited time, while this holds of any rank; False if a rank was lost."""
        deadline = time.monotonic() + _PEER_WAIT_S
        while any(map(is_behind, self._status_page.rank_entries)):
            if self._interrupted():
                return False
            if time.monotonic() > deadline:
                break
            time.sleep(_SLOT_POLL_S)
        return True

    def close(self) -> None:
        """End the thread after its running capture."""
        with self._changed:
            self._closing = self._cancel_pending = True
            self._changed.notify_all()
        self._thread.join(_COPY_WAIT_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._capture is not None or self._closing)
                capture = self._capture
            if capture is None:
                return
            try:
                self._perform(capture)
            except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
                self._failure = error
            capture = None  # its copies may be large
            self._rank_entry.copying = Copying.NOTHING
            with self._changed:
                self._capture, self._cancel_pending = None, False
                self._changed.notify_all()

    def _perform(self, capture: StateCapture) -> None:
        slot = self._await_slot()
        if slot is None:
            self._skip(capture.version)
        else:
            self._write(slot, capture)

    def _write(self, slot: int, capture: StateCapture) -> None:
        started_ns = time.monotonic_ns()
        self._rank_entry.copying = Copying.WRITING
        self._rank_entry.set_slot(slot, BUSY)
        written, no_memory = False, ""
        try:
            written = self._writer.write(self._memories[slot], capture)
        except NoMemoryError as error:
            no_memory = str(error)
        finally:
            if not written:
                mark_empty(self._memories[slot].fd)
                self._rank_entry.set_slot(slot, EMPTY)
        if not written:
            self._skip(capture.version, no_memory)
            return
        if self._rank_entry.skipped == capture.version:
            self._rank_entry.skipped = EMPTY  # skipped before a rollback, and captured now
        self._rank_entry.set_slot(slot, capture.version)
        self._rank_entry.growing = 0  # there was memory
        self._rank_entry.capture_ns = time.monotonic_ns() - started_ns
        self._on_captured(capture.version)

    def _await_slot(self) -> int | None:
        deadline = time.monotonic() + _SLOT_WAIT_S
        while True:
            # Read before the slots: the last look at them must come after the decision to give up.
            cancelled = self._cancel_pending or self._interrupted()
            if (slot := self._free_slot()) is not None:
                return slot
            if cancelled or time.monotonic() > deadline:
                return None
            with self._changed:
                if not self._cancel_pending:
                    self._changed.wait(_SLOT_POLL_S)

    def _free_slot(self) -> int | None:
        page = self._status_page
        return free_slot(self._rank_entry.slots, page.committed(), page.abandoned(), page.kept)

    def _skip(self, version: Version, no_memory: str = "") -> None:
        self._rank_entry.skipped = version
        self._on_skip(version, no_memory)
