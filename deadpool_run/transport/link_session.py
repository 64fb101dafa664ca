"""Messages between two agents that were not received yet. They are sent again if the connection breaks."""

from collections import deque

MAX_UNRECEIVED_BYTES = 64 << 20
"""Limit on what is kept for a peer that is not connected."""


class LinkSession:
    """One end. It outlives its connections, and counts the messages each way; heartbeats and their answers are none."""

    def __init__(self) -> None:
        self.received = 0
        """The number of the peer's messages that came."""
        self.acknowledged = 0
        """The number of messages that the peer is known to have."""
        self._unreceived: deque[bytes] = deque()
        self._dropped = 0
        self._bytes = 0

    @property
    def count(self) -> int:
        """Return the number of messages that were sent, or are to be."""
        return self._dropped + len(self._unreceived)

    def sent(self, frame: bytes) -> None:
        """Keep a message, which is sent now, or when there is a connection again."""
        self._unreceived.append(frame)
        self._bytes += len(frame)
        while self._bytes > MAX_UNRECEIVED_BYTES:
            self._drop()

    def confirmed(self, count: int) -> None:
        """Note how many messages the peer has received."""
        self.acknowledged = max(count, self.acknowledged)
        while self._unreceived and self._dropped < count:
            self._drop()

    def rest(self, count: int) -> list[bytes] | None:
        """Return the messages after the first `count`, which the peer has; None if some of them are no longer kept."""
        self.confirmed(count)
        return list(self._unreceived) if self._dropped == count else None

    def _drop(self) -> None:
        self._bytes -= len(self._unreceived.popleft())
        self._dropped += 1
