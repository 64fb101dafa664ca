"""The leader's log on its way to other nodes: the whole state to a node that begins to follow, then events, turn by turn."""

import asyncio

from deadpool_run.core.events import Event
from deadpool_run.core.state import State
from deadpool_run.ids import NodeId
from deadpool_run.transport.connections import Connections
from deadpool_run.wire import peers

_MOST_TOGETHER = 1024
"""Events of one message: a follower answers no heartbeat while it decides on them."""


class LogSender:
    """The nodes that follow the log, in the running loop. The events of one turn of the loop are one message.

    The message leaves before the orders that follow from its events: orders are written after the turn.
    """

    def __init__(self, connections: Connections) -> None:
        self.followers: set[NodeId] = set()
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._term = self._after = 0
        self._entries: list[peers.LogEntry] = []
        """Events of this turn that are not sent yet. They follow after `_after` others."""

    def begin(self, node: NodeId, term: int, entries: int, now: float, state: State) -> None:
        """Send a node the state after so many events, and the next events from now on."""
        self.flush()  # a node must not get events that the state includes
        self.followers.add(node)
        for part in peers.log_state(term, entries, now, state):
            self._connections.send(node, part)

    def log(self, term: int, entries: int, now: float, event: Event) -> None:
        """Send the event, which makes `entries` of them, at the end of this turn."""
        if not self.followers:
            return
        if term != self._term or len(self._entries) >= _MOST_TOGETHER:
            self.flush()
        if not self._entries:
            self._term, self._after = term, entries - 1
            self._loop.call_soon(self.flush)
        self._entries.append(peers.LogEntry(now, event))

    def flush(self) -> None:
        """Send the events that wait."""
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        for frame in peers.log_frames(self._term, self._after, entries):
            self._connections.send_now(sorted(self.followers), frame)
