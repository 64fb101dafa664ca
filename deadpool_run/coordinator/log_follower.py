"""What a log follower knows: the coordinator's state, followed fact by fact, so that it can go on from there."""

from dataclasses import dataclass

from deadpool_run.core import coordinator
from deadpool_run.core.leadership.electorate import LogIndex
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.wire.peers import LogEntry, LogState


@dataclass(slots=True)
class FollowedLog:
    """The state after so many facts, the last of them decided on at `now`, a time of the coordinator's clock."""

    index: LogIndex
    now: float
    state: State


class LogFollower:
    """Follows one log at a time; a new one begins with `LogState`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.known: FollowedLog | None = None

    def begin(self, told: LogState) -> None:
        """Take in a whole state."""
        self.known = FollowedLog(LogIndex(told.term, told.entries), told.now, told.state)

    def follow(self, told: LogEntry) -> None:
        """Take in the next fact. Raises `ProtocolError` if one is missing."""
        known = self.known
        if known is None or known.index != LogIndex(told.term, told.entries - 1):
            raise ProtocolError(f"entry {told.entries} of term {told.term} does not follow {known and known.index}")
        self.known = None  # a step that raises leaves nothing to lead from
        coordinator.step(self._settings, known.state, told.event, told.now)
        self.known = FollowedLog(LogIndex(told.term, told.entries), told.now, known.state)
