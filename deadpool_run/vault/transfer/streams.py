"""Several connections for one segment, each with a part of its bytes: one connection may not fill the link.

The first connection of a delivery carries the messages, with the number of parts (`of`). Each of the others announces its part
with a `headers.PartHeader`, and the part follows as in `exchange`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from deadpool_run.errors import ProtocolError
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.wire.peer_connection import PeerConnection

MIN_PART_BYTES = 32 << 20
"""A smaller part is not worth a connection."""
MAX_PARTS = 16

Dial = Callable[[str, int], PeerConnection]
"""Connects to the vault at an address and port. Raises OSError."""


def worthwhile(nbytes: int, most: int) -> int:
    """Return the number of parts for `nbytes` bytes, up to `most`."""
    return max(1, min(most, nbytes // MIN_PART_BYTES, MAX_PARTS))


class StreamPool:
    """Connections to one peer, and threads that use them. For one thread, except `shut_down`.

    The first connection carries the messages and a part, each of the others another part.
    """

    def __init__(self, dial: Callable[[], PeerConnection]) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._connections: list[PeerConnection] = []
        self._stopping = False

    def first(self) -> PeerConnection:
        """Return the first connection, after opening it if there is none. Raises OSError."""
        if not self._connections:
            self._connect()
        return self._connections[0]

    def open(self, count: int) -> int:
        """Open up to `count` connections in addition to the first; return their number."""
        with contextlib.suppress(OSError):  # continue with fewer
            while len(self._connections) <= count:
                self._connect()
        return min(count, len(self._connections) - 1)

    def work(self, own: Callable[[PeerConnection], object], *tasks: Callable[[PeerConnection], object]) -> None:
        """Run `own` on the first connection in this thread, and each task on another connection in its own thread.

        Raises the first error; call `close` then.
        """
        failures: list[Exception] = []

        def run(task: Callable[[PeerConnection], object], connection: PeerConnection) -> None:
            try:
                task(connection)
            except Exception as error:  # noqa: BLE001 - it is raised below
                failures.append(error)
                self._end_tasks()

        threads = [
            threading.Thread(target=run, args=(task, connection), name="deadpool-part", daemon=True)
            for task, connection in zip(tasks, self._connections[1:], strict=False)
        ]
        for thread in threads:
            thread.start()
        try:
            own(self._connections[0])
        except BaseException:
            self._end_tasks()
            raise
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def shut_down(self) -> None:
        """End every wait on the connections, and open no others. Safe from any thread."""
        with self._lock:
            self._stopping = True
            for connection in self._connections:
                framing.shut_down(connection.sock)

    def close(self) -> None:
        """Close the connections; others may be opened."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def _connect(self) -> None:
        if not self._stopping:
            connection = self._dial()
            with self._lock:
                self._connections.append(connection)
            framing.prepare(connection.sock)
        if self._stopping:
            raise ConnectionError("the transfer was cancelled")

    def _end_tasks(self) -> None:
        with self._lock:
            for connection in self._connections[1:]:
                framing.shut_down(connection.sock)


class StripedReceive:
    """A segment received in `of` parts. The first part's thread waits for the others, which write to the same memory."""

    def __init__(self, receive: Callable[[PeerConnection, int, int], Outcome], of: int) -> None:
        self._receive, self._of = receive, of
        self._changed = threading.Condition()
        self._taken: dict[int, PeerConnection] = {}
        self._ended: dict[int, Outcome] = {}
        self._over = False

    def bring(self, part: int, of: int, connection: PeerConnection) -> None:
        """Receive a part, in the thread of its connection. Raises OSError and `ProtocolError`."""
        with self._changed:
            if self._over or of != self._of or not 0 < part < of or part in self._taken:
                raise ProtocolError(f"part {part} of {of} is not expected")
            self._taken[part] = connection
        outcome = Outcome.TORN
        try:
            outcome = self._receive(connection, part, of)
        finally:
            with self._changed:
                self._ended[part] = outcome
                self._changed.notify_all()

    def outcome(self, first: Outcome) -> Outcome:
        """Wait for all parts; return the outcome of the whole. It is torn if the connection of a part broke."""
        with self._changed:
            whole = self._changed.wait_for(lambda: len(self._ended) == self._of - 1, framing.TIMEOUT_S)
            return max(first, *self._ended.values(), Outcome.WHOLE if whole else Outcome.TORN)

    def close(self) -> None:
        """Wait until no thread writes to the memory any more."""
        with self._changed:
            self._over = True
            for part in self._taken.keys() - self._ended.keys():
                framing.shut_down(self._taken[part].sock)
            self._changed.wait_for(lambda: len(self._ended) == len(self._taken))


class StripedReceives:
    """The running striped receives, by delivery."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: dict[bytes, StripedReceive] = {}
        self._closed = False

    @contextlib.contextmanager
    def running(self, delivery: bytes, striped_receive: StripedReceive) -> Iterator[None]:
        """Accept parts of this delivery meanwhile; wait at the end for those that are running."""
        with self._changed:
            self._found[delivery] = striped_receive
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._found.pop(delivery, None)
            striped_receive.close()

    def find(self, delivery: bytes) -> StripedReceive:
        """Wait for the delivery to begin. Raises `ProtocolError` if it does not within the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or delivery in self._found, framing.TIMEOUT_S)
            found = self._found.get(delivery)
        if found is None:
            raise ProtocolError("a part belongs to an unknown delivery")
        return found

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
