"""Several connections for one segment, where one does not fill the link: each carries a part of its bytes.

The first connection of a delivery is the one that talks, and says how many parts there are (`of`). Each of the others says
which part of which delivery it brings (`headers.Part`), and the bytes follow as `framing` has them.
Both ends cut what is to be sent into parts in the same way, so that nothing more needs to be said.
"""

import socket
import threading
from collections.abc import Callable, Sequence

from deadpool_run.errors import ProtocolError
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.framing import Outcome, Range

MIN_PART_BYTES = 32 << 20
"""What is smaller is not worth a further connection."""
MAX_PARTS = 16


def worthwhile(nbytes: int, most: int) -> int:
    """Return into how many parts to cut so many bytes, if there may be `most`."""
    return max(1, min(most, nbytes // MIN_PART_BYTES, MAX_PARTS))


def cut(ranges: Sequence[Range], count: int) -> list[list[Range]]:
    """Return the ranges as so many parts of about the same number of bytes, in order."""
    share = -(-sum(end - begin for begin, end in ranges) // count)
    parts: list[list[Range]] = [[]]
    room = share
    for begin, end in ranges:
        at = begin
        while at < end:
            if room == 0:
                parts.append([])
                room = share
            upto = min(end, at + room)
            parts[-1].append((at, upto))
            room -= upto - at
            at = upto
    return parts + [[] for _ in range(count - len(parts))]


class StreamPool:
    """Connections beside the one that talks, and threads that work with them. One thread's, but for `shut_down`."""

    def __init__(self, dial: Callable[[], socket.socket]) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._stopping = False

    def open(self, count: int) -> int:
        """Have so many connections, or as many of them as can be had; return how many there are."""
        try:
            while len(self._socks) < count:
                sock = self._dial()
                with self._lock:
                    self._socks.append(sock)
                    if self._stopping:
                        framing.shut_down(sock)
                framing.prepare(sock)
        except OSError:  # what there is must do
            pass
        return min(count, len(self._socks))

    def work(self, tasks: Sequence[Callable[[socket.socket], object]], own: Callable[[], object]) -> None:
        """Do a task on each of as many connections, and `own` in this thread. Raises what went wrong first.

        Connections on which anything went wrong are of no use any more: `close` then.
        """
        failures: list[Exception] = []

        def run(task: Callable[[socket.socket], object], sock: socket.socket) -> None:
            try:
                task(sock)
            except Exception as error:  # noqa: BLE001 - it is raised below
                failures.append(error)
                self.shut_down()

        threads = [
            threading.Thread(target=run, args=(task, sock), name="deadpool-part", daemon=True)
            for task, sock in zip(tasks, self._socks, strict=False)
        ]
        for thread in threads:
            thread.start()
        try:
            own()
        except BaseException:
            self._shut_down_now()
            raise
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def shut_down(self) -> None:
        """End every wait on the connections. Safe from any thread."""
        with self._lock:
            self._stopping = True
        self._shut_down_now()

    def close(self) -> None:
        """Give the connections up; others may be opened."""
        with self._lock:
            socks, self._socks = self._socks, []
            self._stopping = False
        for sock in socks:
            sock.close()

    def _shut_down_now(self) -> None:
        with self._lock:
            for sock in self._socks:
                framing.shut_down(sock)


class StripedReceive:
    """A segment that comes in parts. The first part's thread waits for the others, which write to the same memory."""

    def __init__(self, view: memoryview, parts: Sequence[Sequence[Range]]) -> None:
        self._view = view
        self._parts = parts
        self._changed = threading.Condition()
        self._taken: dict[int, socket.socket] = {}
        self._ended: dict[int, Outcome | None] = {}
        self._over = False

    def bring(self, part: int, of: int, sock: socket.socket, meter: framing.Meter) -> None:
        """Receive a part, on its own thread. Raises OSError and `ProtocolError`."""
        with self._changed:
            if self._over or of != len(self._parts) or not 0 < part < of or part in self._taken:
                raise ProtocolError(f"part {part} of {of} is not due")
            self._taken[part] = sock
        outcome = None
        try:
            outcome = framing.receive_segment(sock, self._view, meter, self._parts[part])
        finally:
            with self._changed:
                self._ended[part] = outcome
                self._changed.notify_all()

    def outcome(self, first: Outcome) -> Outcome:
        """Wait for all parts; return what became of the whole. A part whose connection broke leaves it torn."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ended) == len(self._parts) - 1, framing.TIMEOUT_S)
            found = {first, *(Outcome.TORN if each is None else each for each in self._ended.values())}
            if len(self._ended) < len(self._parts) - 1:
                found.add(Outcome.TORN)
        return max(found)

    def close(self) -> None:
        """Return when nobody writes to the memory any more."""
        with self._changed:
            self._over = True
            for part, sock in self._taken.items():
                if part not in self._ended:
                    framing.shut_down(sock)
            self._changed.wait_for(lambda: len(self._ended) == len(self._taken))


class StripedReceives:
    """Where the connections that bring parts find what these are parts of."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._found: dict[bytes, StripedReceive] = {}
        self._closed = False

    def begin(self, delivery: bytes, striped_receive: StripedReceive) -> None:
        """Let parts of this delivery come."""
        with self._changed:
            self._found[delivery] = striped_receive
            self._changed.notify_all()

    def end(self, delivery: bytes) -> None:
        """Let no further ones come, and return when none does any more."""
        with self._changed:
            striped_receive = self._found.pop(delivery, None)
        if striped_receive is not None:
            striped_receive.close()

    def find(self, delivery: bytes) -> StripedReceive:
        """Return it once it has begun. Raises `ProtocolError` if it does not in good time."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or delivery in self._found, framing.TIMEOUT_S)
            found = self._found.get(delivery)
        if found is None:
            raise ProtocolError("a part of a delivery that is not on its way")
        return found

    def close(self) -> None:
        """Have nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
