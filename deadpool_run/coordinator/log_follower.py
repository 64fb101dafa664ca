"""The log follower: replays the coordinator's log, so that this node can take over."""

from dataclasses import dataclass

from deadpool_run.core import coordinator
from deadpool_run.core.leadership.electorate import LogIndex
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import typed
from deadpool_run.wire.facts import decode_event
from deadpool_run.wire.peers import LogEntry, LogState


@dataclass(slots=True)
class FollowedLog:
    """The state after the entry `index`, which was decided on at `now` of the coordinator's clock."""

    index: LogIndex
    now: float
    state: State


class LogFollower:
    """Follows one log at a time. A new one begins with `LogState`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.known: FollowedLog | None = None

    def begin(self, told: LogState) -> None:
        """Begin with a whole state. Raises `ProtocolError`."""
        try:
            state: State = typed.build(State, told.state)
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"not a coordinator's state: {error}") from error
        self.known = FollowedLog(LogIndex(told.term, told.entries), told.now, state)

    def follow(self, told: LogEntry) -> None:
        """Replay the next entry. Raises `ProtocolError` if one is missing."""
        known = self.known
        if known is None or known.index != LogIndex(told.term, told.entries - 1):
            raise ProtocolError(f"entry {told.entries} of term {told.term} does not follow {known and known.index}")
        event = decode_event(told.event)
        self.known = None  # a step that raises leaves nothing to lead from
        coordinator.step(self._settings, known.state, event, told.now)
        self.known = FollowedLog(LogIndex(told.term, told.entries), told.now, known.state)
