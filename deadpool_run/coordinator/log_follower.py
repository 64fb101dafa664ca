"""The coordinator's state on another node, which follows the log event by event and can continue from it."""

from dataclasses import dataclass

from deadpool_run.core import coordinator
from deadpool_run.core.leadership.electorate import LogIndex
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.wire.peers import LogEntries, LogState, state_of


@dataclass(slots=True)
class FollowedLog:
    """The state after the events up to `index`, the last of them decided at `now` of the coordinator's clock."""

    index: LogIndex
    now: float
    state: State


class LogFollower:
    """Follows one log at a time. Another one begins with `LogState`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.known: FollowedLog | None = None
        self._parts: list[LogState] = []

    def take_in(self, message: LogState | LogEntries) -> FollowedLog | None:
        """Take in a message; return what is known then. Raises `ProtocolError`."""
        if isinstance(message, LogState):
            self.begin(message)
        else:
            self.follow(message)
        return self.known

    def begin(self, log: LogState) -> None:
        """Take in a part of a whole state, and begin with it after the last part. Raises `ProtocolError` if it is none."""
        if self._parts and (self._parts[-1].term, self._parts[-1].entries) != (log.term, log.entries):
            self._parts.clear()  # the leader that sent them is gone
        self._parts.append(log)
        if log.is_last:
            parts, self._parts = self._parts, []
            self.known = FollowedLog(LogIndex(log.term, log.entries), log.now, state_of(each.part for each in parts))

    def follow(self, log: LogEntries) -> None:
        """Decide on the next events. Raises `ProtocolError` if one is missing."""
        known = self.known
        if known is None or known.index != LogIndex(log.term, log.after):
            raise ProtocolError(
                f"what comes after entry {log.after} of term {log.term} does not follow {known and known.index}"
            )
        self.known = None  # a step that raises leaves nothing to lead from
        now = known.now
        for entry in log.entries:
            now = entry.now
            coordinator.step(self._settings, known.state, entry.event, now)
        self.known = FollowedLog(LogIndex(log.term, log.after + len(log.entries)), now, known.state)
