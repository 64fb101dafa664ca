"""A group's communicator in one epoch, and the end of all of an epoch's communicators.

Libraries forbid an abort while another thread is inside one of their calls. So each call enters and leaves the channel, and
an abort closes the channel, waits a limited time until no thread is inside, and aborts then.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import ProcessGroup

from deadpool_run.worker.device.backend import DeviceBackend

_INSIDE_S = 2.0
"""An abort waits up to this long for calls that are inside. Calls do not block, so it is rarely a millisecond."""


class Channel:
    """A communicator, and the calls that are inside it. Thread-safe."""

    def __init__(self, communicator: Any, target: Any) -> None:
        self.communicator = communicator
        self.target = target
        """The object whose methods issue collectives."""
        self.closed = False
        self.ended = False
        """Whether it was shut down in order, and needs no abort."""
        self._inside = 0
        self._changed = threading.Condition(threading.Lock())

    def enter(self) -> bool:
        """Enter for a call, to be left again; False if the channel is closed."""
        with self._changed:
            if self.closed:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """Leave after a call."""
        with self._changed:
            self._inside -= 1
            if self.closed and not self._inside:
                self._changed.notify_all()

    def close(self) -> None:
        """Let no further call enter."""
        with self._changed:
            self.closed = True

    def wait_idle(self) -> None:
        """Wait a limited time until no thread is inside. Only the abort frees a call that does not return."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inside, _INSIDE_S)


class StartedCoalescing:
    """A coalescing on the device, from its start to its end. It stays inside the channel: an abort waits for its end."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.fills: list[Callable[[], None]] = []

    def fill(self) -> None:
        """Record what the coalesced collectives received."""
        for fill in self.fills:
            fill()


class ThreadCoalescing(threading.local):
    """The coalescing that a thread has started and not ended yet, on the device or over Gloo."""

    started: StartedCoalescing | None = None
    inner: ProcessGroup | None = None


class ChannelsEnd:
    """The end of several channels: each on a thread of its own, because one may wait for another."""

    def __init__(self, action: Callable[[Channel], None], channels: Sequence[Channel], *, what: str) -> None:
        """Close the channels, and start `action` on each of them."""
        self.channels = tuple(channels)
        self._action = action
        self._what = what
        self._failures: list[str] = []
        for channel in self.channels:
            channel.close()
        self._threads = [
            threading.Thread(target=self._end, args=(channel,), name=f"deadpool-{what}", daemon=True)
            for channel in self.channels
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, deadline: float) -> str:
        """Wait until the deadline (of `time.monotonic`); return what failed or is late, empty if all have ended."""
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if late := sum(thread.is_alive() for thread in self._threads):
            return f"the {self._what} of {late} of {len(self._threads)} communicators did not end in time"
        return "; ".join(self._failures)

    def _end(self, channel: Channel) -> None:
        channel.wait_idle()
        try:
            self._action(channel)
        except Exception as error:  # noqa: BLE001 - the caller of `wait` gets it
            self._failures.append(f"the {self._what} of a communicator failed: {error}")


def quiesce(backend: DeviceBackend, channels: Sequence[Channel]) -> ChannelsEnd:
    """Start to abort every channel that is not shut down; all aborts are started before any is waited for."""
    running = [channel for channel in channels if not channel.ended]
    return ChannelsEnd(lambda channel: backend.abort(channel.communicator), running, what="abort")


def release(backend: DeviceBackend, channels: Sequence[Channel]) -> ChannelsEnd:
    """Start to free what aborted channels still have."""
    return ChannelsEnd(lambda channel: backend.release(channel.communicator), channels, what="release")


def shut_down(backend: DeviceBackend, channels: Sequence[Channel]) -> ChannelsEnd:
    """Start to shut the channels down in order: their collectives have ended, those of peers perhaps not."""

    def end(channel: Channel) -> None:
        backend.shut_down(channel.communicator)
        channel.ended = True

    return ChannelsEnd(end, channels, what="end")
