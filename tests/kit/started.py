"""Brings a coordinator's job to its training, event by event."""

from collections.abc import Callable

from deadpool_run.core import events as ev
from deadpool_run.core.state import State


def bring_up(state: State, tell: Callable[[ev.Event], object]) -> None:
    """Send the events of all workers' start, and of every rank's set-up and first steps."""
    for worker in list(state.members):
        tell(ev.WorkerStarted(worker, 100 + worker))
        tell(ev.WorkerReady(worker))
    for member in list(state.owners()):
        tell(ev.ScriptInitialized(member.worker))
        tell(ev.TranscriptCompleted(member.worker))
