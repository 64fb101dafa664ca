"""Translates workers' messages to facts for the coordinator. Pure."""

from collections.abc import Callable, Mapping

from msgspec.structs import asdict

from deadpool_run.core import events
from deadpool_run.core.events import Event
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import WorkerId
from deadpool_run.wire import messages
from deadpool_run.wire.messages import Message

_EVENTS: Mapping[type[Message], Callable[..., Event]] = {
    messages.Ready: events.WorkerReady,
    messages.Prepared: events.SparePrepared,
    messages.PrepareBroke: events.PrepareFailed,
    messages.Initialized: events.ScriptInitialized,
    messages.SetupDone: events.SetupCompleted,
    messages.Sealed: events.TranscriptSealed,
    messages.Raised: events.WorkerRaised,
    messages.ScriptRefused: events.JobRefused,
    messages.TrainsOutsideLoop: events.LoopBypassed,
    messages.Drained: events.SurvivorDrained,
    messages.DrainBroke: events.DrainFailed,
    messages.Unwound: events.RunUnwound,
    messages.Rehearsed: events.ReplacementRehearsed,
    messages.Restored: events.RankRestored,
    messages.Attached: events.RankAttached,
    messages.AttachBroke: events.AttachFailed,
    messages.FirstStep: events.FirstStepCompleted,
    messages.PeerSuspected: events.CollectiveFailed,
    messages.Skipped: events.CaptureSkipped,
    messages.Finished: events.LoopFinished,
}
"""The event of each message has the message's fields, and the worker."""


def to_event(worker: WorkerId, message: Message) -> Event:
    """Return the fact. Raises `ProtocolError` for a message that no worker may send."""
    event = _EVENTS.get(type(message))
    if event is None:
        raise ProtocolError(f"worker {worker} sent {type(message).__name__}, which no worker may send")
    fields = asdict(message)
    return event(worker, **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
