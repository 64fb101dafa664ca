"""Output through a thread with a bounded queue: a file system or terminal that stalls costs lines, and never the caller's time."""

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_WRITE_BYTES = 64 << 10
"""Bytes of one write, and between two checks for progress."""
_PAUSE_S = 0.01
"""Pause of the thread once its queue is empty. Lines that come meanwhile are written together."""
PATIENCE_S = 1.0
"""How long a waiting caller takes a sink without progress for a slow one. Then it is stalled, and lines are dropped."""

Fault = Callable[[OSError], None]


class Sink:
    """Does what its streams and callers ask for, in order, in one thread, which the first request starts.

    Data over `max_bytes` is dropped and counted. A thread that waits for a disk does not keep the process from ending.
    """

    def __init__(self, name: str, max_bytes: int = 16 << 20, *, stays: bool = True) -> None:
        """Unless it `stays`, the thread ends when there is nothing to do, and the next request starts another."""
        self._name = name
        self._stays = stays
        self._max_bytes = max_bytes
        lock = threading.Lock()
        self._work, self._room = threading.Condition(lock), threading.Condition(lock)
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        self._progress = 0
        self._stalled_at: int | None = None
        self._idle = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all that was asked for is done."""
        return not self._bytes and not self._queue

    def put(self, action: Callable[[], None], size: int = 0, *, patience_s: float | None = None) -> bool:
        """Have the thread call `action`, which counts as `size` bytes; return whether it will.

        With a patience, wait for room in the half of the queue that such callers may fill, as long as there is progress.
        """
        with self._room:
            if self._closing or not self._has_room(size, patience_s) or not self._has_thread():
                return False
            self._queue.append((size, action))
            self._bytes += size
            if self._idle:
                self._idle = False
                self._work.notify()
        return True

    def done(self, size: int) -> None:
        """Report how many bytes of an action are written. For the sink's thread."""
        with self._room:
            self._bytes -= size
            self._progress += 1
            self._room.notify_all()

    def close(self, grace_s: float) -> bool:
        """Take nothing more, and wait up to `grace_s` for all that was taken; return whether it is done."""
        with self._work:
            self._closing = True
            self._work.notify()
            self._room.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, grace_s))
        return thread is None or not thread.is_alive()

    def _has_thread(self) -> bool:
        """Start the thread if there is none. Its start does not wait for the lock that the caller holds."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # this machine or control group has no process left; the next caller tries again
                return False
            self._thread = thread
        return True

    def _has_room(self, size: int, patience_s: float | None) -> bool:
        if not size:
            return True
        limit = self._max_bytes if patience_s is None else self._max_bytes // 2
        while self._bytes and self._bytes + size > limit:
            if patience_s is None or self._stalled_at == self._progress or self._closing:
                return False
            before = self._progress
            if not self._room.wait(patience_s) and self._progress == before:
                self._stalled_at = before
        return True

    def _run(self) -> None:
        while (action := self._take()) is not None:
            action()

    def _take(self) -> Callable[[], None] | None:
        """Return the next action; None at the end."""
        with self._work:
            if not self._queue and not self._closing:
                self._work.wait(_PAUSE_S)  # only `close` notifies: lines gather
            while not self._queue:
                if self._closing or not self._stays:
                    self._thread = None
                    return None
                self._idle = True
                self._work.wait()
                self._idle = False
            return self._merged()

    def _merged(self) -> Callable[[], None]:
        """Return the first action, or one for the first data of the same stream in the queue."""
        size, action = self._queue.popleft()
        if not isinstance(action, _Data):
            return action
        parts = [action.data]
        while self._queue and size < _WRITE_BYTES:
            more, other = self._queue[0]
            if not isinstance(other, _Data) or other.stream is not action.stream:
                break
            self._queue.popleft()
            parts.append(other.data)
            size += more
        return _Data(action.stream, b"".join(parts))


class Stream:
    """One file of a sink, opened by its thread.

    After an error the next data is tried again, except with `ends_at_fault`. The first error is reported to `on_fault`, in the
    sink's thread. `notice` is the text in place of dropped lines, from their number.
    """

    def __init__(  # noqa: PLR0913 - how it is opened and closed, and what becomes of errors
        self,
        sink: Sink,
        open_: Callable[[], int],
        *,
        on_fault: Fault = lambda _: None,
        notice: Callable[[int], bytes] | None = None,
        ends_at_fault: bool = False,
        owned: bool = True,
    ) -> None:
        """`owned`: the stream closes what it opened."""
        self._sink: Final = sink
        self._open = open_
        self._on_fault = on_fault
        self._notice = notice
        self._ends_at_fault = ends_at_fault
        self._owned = owned
        self._fd = -1
        self._lock = threading.Lock()
        self._unreported = 0
        self._noting = False
        self.failure: OSError | None = None
        """The first error."""
        self.dropped = 0
        """Lines that were not written."""

    def put(self, data: bytes, *, patience_s: float | None = None) -> bool:
        """Write the data after all that came before; return False if it is dropped. See `Sink.put`."""
        self._note_gap()
        taken = self._sink.put(_Data(self, data), len(data), patience_s=patience_s)
        if not taken:
            self._drop(data)
            self._note_gap()
        return taken

    def close(self) -> None:
        """Close the file after all that came before."""
        self._note_gap()
        self._sink.put(self._close)

    def _drop(self, data: bytes | memoryview) -> None:
        lines = bytes(data).count(b"\n") or 1
        with self._lock:
            self.dropped += lines
            self._unreported += lines

    def _note_gap(self) -> None:
        """Have the notice written after all that came before, if lines were dropped and it is not in the queue."""
        if self._notice is None or not self._unreported or self._noting:
            return
        self._noting = True
        self._sink.put(self._write_notice)

    def _write_notice(self) -> None:
        assert self._notice is not None
        with self._lock:
            count, self._unreported = self._unreported, 0
            self._noting = False
        if self._write_all(self._notice(count)):
            with self._lock:
                self._unreported += count

    def write(self, data: bytes) -> None:
        """Write the data. For the sink's thread."""
        if rest := self._write_all(data, self._sink.done):
            self._drop(rest)
            self._sink.done(len(rest))

    def _write_all(self, data: bytes, on_written: Callable[[int], None] = lambda _: None) -> memoryview:
        """Return what could not be written."""
        left = memoryview(data)
        if self.failure is not None and self._ends_at_fault:
            return left
        try:
            if self._fd < 0:
                self._fd = self._open()
            while left:
                written = self._write_some(left)
                left = left[written:]
                on_written(written)
        except OSError as error:
            if self.failure is None:
                self.failure = error
                self._on_fault(error)
        return left

    def _write_some(self, data: memoryview) -> int:
        while True:
            try:
                return os.write(self._fd, data[:_WRITE_BYTES])
            except BlockingIOError:  # another holder of the descriptor has made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()

    def _close(self) -> None:
        if self._fd >= 0 and self._owned:
            os.close(self._fd)
        self._fd = -1


class _Data:
    """A request to write data to a stream."""

    __slots__ = ("data", "stream")

    def __init__(self, stream: Stream, data: bytes) -> None:
        self.stream, self.data = stream, data

    def __call__(self) -> None:
        self.stream.write(self.data)
