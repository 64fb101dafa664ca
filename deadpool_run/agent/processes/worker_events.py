"""Translates workers' messages to facts for the coordinator. Pure."""

from deadpool_run.core import events
from deadpool_run.core.events import Event
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Epoch, Rank, Version, WorkerId
from deadpool_run.wire import messages
from deadpool_run.wire.messages import Message


def to_event(worker: WorkerId, message: Message) -> Event:  # noqa: C901, PLR0911, PLR0912 - one line for each message
    """Return the fact. Raises `ProtocolError` for a message that no worker may send."""
    match message:
        case messages.Ready():
            return events.WorkerReady(worker)
        case messages.Prepared():
            return events.SparePrepared(worker)
        case messages.PrepareBroke(text):
            return events.PrepareFailed(worker, text)
        case messages.Initialized():
            return events.ScriptInitialized(worker)
        case messages.SetupDone():
            return events.SetupCompleted(worker)
        case messages.Sealed(like):
            return events.TranscriptSealed(worker, None if like is None else Rank(like))
        case messages.Raised(step, kind, text, traceback, blame):
            return events.WorkerRaised(worker, step, kind, text, traceback, blame)
        case messages.ScriptRefused(text, exit_code):
            return events.JobRefused(worker, text, exit_code)
        case messages.TrainsOutsideLoop():
            return events.LoopBypassed(worker)
        case messages.Drained(epoch, completed, live, captured):
            holds = None if live is None else Version(live)
            versions = tuple(Version(version) for version in captured)
            return events.SurvivorDrained(worker, Epoch(epoch), Version(completed), holds, versions)
        case messages.DrainBroke(epoch, text, again, step, kind, error, traceback, blame):
            return events.DrainFailed(worker, Epoch(epoch), text, again, step, kind, error, traceback, blame)
        case messages.Unwound(completed, captured):
            return events.RunUnwound(worker, Version(completed), tuple(Version(version) for version in captured))
        case messages.Rehearsed(epoch):
            return events.ReplacementRehearsed(worker, Epoch(epoch))
        case messages.Restored(epoch):
            return events.RankRestored(worker, Epoch(epoch))
        case messages.Attached(epoch):
            return events.RankAttached(worker, Epoch(epoch))
        case messages.AttachBroke(epoch, text):
            return events.AttachFailed(worker, Epoch(epoch), text)
        case messages.FirstStep(epoch):
            return events.FirstStepCompleted(worker, Epoch(epoch))
        case messages.PeerSuspected(epoch, text):
            return events.CollectiveFailed(worker, Epoch(epoch), text)
        case messages.Skipped(version):
            return events.CaptureSkipped(worker, Version(version))
        case messages.Finished(version):
            return events.LoopFinished(worker, Version(version))
        case _:
            raise ProtocolError(f"worker {worker} sent {type(message).__name__}, which no worker may send")
