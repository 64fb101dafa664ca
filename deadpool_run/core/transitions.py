"""The job's phases and a member's phases, and every transition between them, as data.

The coordinator moves phases only along these tables, and `tests/core/diagram.py` draws the documentation's diagram from them.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev


class JobPhase(StrEnum):
    """Phases of the job."""

    NEW = "new"
    """No job was submitted yet."""
    STARTING = "starting"
    """Workers start; none holds a rank."""
    SETTING_UP = "setting up"
    """Every rank is held, and set-up or the first two steps are not complete: a loss starts the world again."""
    RUNNING = "running"
    """Every rank's worker is attached to this epoch: a loss is repaired in place."""
    REPAIRING = "repairing"
    """A member was lost; the others wait for its replacement."""
    RESTARTING = "restarting"
    """The world is ended, to start again from the beginning."""
    FINISHING = "finishing"
    """Every step is done and safe; scripts run to their ends."""
    STOPPING = "stopping"
    """Every worker is being ended."""
    STOPPED = "stopped"
    """No worker is left, and nothing more is decided."""


class MemberPhase(StrEnum):
    """Phases in the life of one worker."""

    STARTING = "starting"
    """Ordered; it has not reported that it is ready."""
    READY = "ready"
    """Parked: a spare."""
    PREPARING = "preparing"
    """A spare: it rehearses as a rank ahead of need. It is given none meanwhile."""
    SETTING_UP = "setting up"
    """Its script sets up with its peers (and, if it never calls `init()`, does all its work here)."""
    RUNNING = "running"
    """It trains, attached to the epoch."""
    ABORTING = "aborting"
    """Ordered to abort its step; it has not reported that it has."""
    RECALLED = "recalled"
    """Ordered into a newer epoch during a repair, outside its script. It has not reported its versions again."""
    ABORTED = "aborted"
    """It has aborted its step, and waits for the version to resume from."""
    UNWINDING = "unwinding"
    """Its step could not be aborted: it leaves its run of the script."""
    RE_ENTERING = "re-entering"
    """Its script runs again in the same process against fake groups, like that of a replacement."""
    REHEARSING = "rehearsing"
    """A replacement: its script sets up against fake groups."""
    REHEARSED = "rehearsed"
    """A replacement that waits for the version to resume from."""
    RESTORING = "restoring"
    """Its objects are brought to the resume version."""
    RESTORED = "restored"
    """It waits until every rank is restored."""
    ATTACHING = "attaching"
    """It builds its communicators."""
    UNATTACHED = "unattached"
    """It could not build them. The coordinator waits briefly for news of a lost peer."""
    FINISHED = "finished"
    """It has done its last step and waits for its release."""
    RELEASED = "released"
    """Its script runs to its end."""
    DISMISSED = "dismissed"
    """A spare that was ordered to exit."""
    RAISED = "raised"
    """Its script raised, or the library refused to go on; the exit follows."""
    ENDING = "ending"
    """Ordered to die; the exit is awaited."""
    ENDED = "ended"
    """Reaped."""


class ReplacementAssigned:
    """Trigger: `AssignRank(replacement=True)`, which has another target than `AssignRank(replacement=False)`."""


Trigger = type[ev.Event | do.Effect | ReplacementAssigned]
_M = MemberPhase
_J = JobPhase

_MORTAL: dict[Trigger, MemberPhase] = {
    ev.WorkerExited: _M.ENDED,
    ev.WorkerHung: _M.ENDING,
    do.KillWorker: _M.ENDING,
    do.TerminateWorker: _M.ENDING,
}
_RANKED: dict[Trigger, MemberPhase] = {**_MORTAL, ev.WorkerRaised: _M.RAISED, ev.JobRefused: _M.RAISED}
_SURVIVOR: dict[Trigger, MemberPhase] = {**_RANKED, do.AbortStep: _M.ABORTING}
_IN_REPAIR: dict[Trigger, MemberPhase] = {**_RANKED, do.AbortStep: _M.RECALLED}
_REPLACEMENT: dict[Trigger, MemberPhase] = {**_RANKED, do.AbortStep: _M.REHEARSING}

MEMBER_TRANSITIONS: Mapping[MemberPhase, dict[Trigger, MemberPhase]] = MappingProxyType(
    {
        _M.STARTING: {
            **_MORTAL,
            ev.WorkerStarted: _M.STARTING,
            ev.WorkerReady: _M.READY,
            ev.WorkerStartFailed: _M.ENDED,
        },
        _M.READY: {
            **_MORTAL,
            do.AssignRank: _M.SETTING_UP,
            ReplacementAssigned: _M.REHEARSING,
            do.DismissWorker: _M.DISMISSED,
            do.PrepareSpare: _M.PREPARING,
        },
        _M.PREPARING: {
            **_MORTAL,
            ev.ScriptInitialized: _M.PREPARING,
            ev.SparePrepared: _M.READY,
            ev.PrepareFailed: _M.DISMISSED,
            ev.JobRefused: _M.DISMISSED,  # no rank needs it: only the spare is given up
            do.DismissWorker: _M.DISMISSED,
        },
        _M.SETTING_UP: {
            **_RANKED,
            ev.ScriptInitialized: _M.SETTING_UP,
            ev.SetupCompleted: _M.SETTING_UP,
            ev.LoopBypassed: _M.SETTING_UP,
            ev.CollectiveFailed: _M.SETTING_UP,
            ev.CaptureSkipped: _M.SETTING_UP,
            ev.TranscriptCompleted: _M.RUNNING,
            ev.LoopFinished: _M.FINISHED,  # a loop of fewer than two steps has no complete transcript
        },
        _M.RUNNING: {
            **_SURVIVOR,
            ev.FirstStepCompleted: _M.RUNNING,
            ev.CollectiveFailed: _M.RUNNING,
            ev.CaptureSkipped: _M.RUNNING,
            ev.StepsLimited: _M.RUNNING,
            ev.LoopFinished: _M.FINISHED,
        },
        _M.ABORTING: {
            **_SURVIVOR,
            ev.AbortCompleted: _M.ABORTED,
            ev.AbortFailed: _M.ABORTING,  # what follows is ordered
            do.ReEnter: _M.UNWINDING,
        },
        _M.RECALLED: {
            **_IN_REPAIR,
            ev.AbortCompleted: _M.ABORTED,
            ev.ReplacementRehearsed: _M.REHEARSED,  # a replacement that was recalled before it had restored
            ev.AbortFailed: _M.RECALLED,  # the coordinator has moved, and the last one had brought it into its script
            do.ReEnter: _M.UNWINDING,
        },
        _M.UNWINDING: {
            **_RANKED,
            do.AbortStep: _M.UNWINDING,
            ev.RunUnwound: _M.RE_ENTERING,
            ev.AbortFailed: _M.UNWINDING,
        },
        _M.RE_ENTERING: {
            **_RANKED,
            do.AbortStep: _M.RE_ENTERING,
            ev.ScriptInitialized: _M.RE_ENTERING,
            ev.SetupCompleted: _M.RE_ENTERING,
            ev.ReplacementRehearsed: _M.REHEARSED,
            ev.AbortCompleted: _M.ABORTED,  # the coordinator has moved: see REHEARSING
        },
        _M.ABORTED: {**_IN_REPAIR, do.ResumeFrom: _M.RESTORING},
        _M.REHEARSING: {
            **_REPLACEMENT,
            ev.ScriptInitialized: _M.REHEARSING,
            ev.SetupCompleted: _M.REHEARSING,
            ev.ReplacementRehearsed: _M.REHEARSED,
            # The coordinator has moved, and the last one had brought it further than was known.
            ev.AbortCompleted: _M.ABORTED,
            ev.AbortFailed: _M.REHEARSING,
        },
        _M.REHEARSED: {**_REPLACEMENT, do.ResumeFrom: _M.RESTORING},
        _M.RESTORING: {
            **_IN_REPAIR,
            ev.RankRestored: _M.RESTORED,
            ev.AbortFailed: _M.RESTORING,  # something of its script's cannot be undone; what follows is ordered
            do.ReEnter: _M.UNWINDING,
        },
        _M.RESTORED: {**_IN_REPAIR, do.AttachGroups: _M.ATTACHING},
        # It may have attached already, and be in its script.
        _M.ATTACHING: {**_SURVIVOR, ev.RankAttached: _M.RUNNING, ev.AttachFailed: _M.UNATTACHED},
        _M.UNATTACHED: {**_IN_REPAIR},
        _M.FINISHED: {**_SURVIVOR, ev.StepsLimited: _M.FINISHED, do.ReleaseWorker: _M.RELEASED},
        _M.RELEASED: {**_RANKED},
        _M.DISMISSED: {**_MORTAL},
        _M.RAISED: {**_MORTAL, ev.JobRefused: _M.RAISED},
        _M.ENDING: {
            ev.WorkerStarted: _M.ENDING,  # it was ordered to die before it existed: the order is given again
            ev.WorkerStartFailed: _M.ENDED,
            ev.WorkerExited: _M.ENDED,
            do.AbandonWorker: _M.ENDING,  # its end follows
            do.KillWorker: _M.ENDING,
            do.TerminateWorker: _M.ENDING,
        },
        _M.ENDED: {},
    }
)
"""Per phase: the events and orders that move a member, and its next phase. Other events are ignored."""

JOB_TRANSITIONS: Mapping[JobPhase, frozenset[JobPhase]] = MappingProxyType(
    {
        _J.NEW: frozenset({_J.STARTING, _J.STOPPING}),
        _J.STARTING: frozenset({_J.SETTING_UP, _J.STOPPING}),
        _J.SETTING_UP: frozenset({_J.RUNNING, _J.RESTARTING, _J.FINISHING, _J.STOPPING}),
        _J.RUNNING: frozenset({_J.REPAIRING, _J.FINISHING, _J.STOPPING}),
        _J.REPAIRING: frozenset({_J.RUNNING, _J.RESTARTING, _J.STOPPING}),
        _J.RESTARTING: frozenset({_J.STARTING, _J.STOPPING}),
        _J.FINISHING: frozenset({_J.STOPPED, _J.REPAIRING, _J.STOPPING}),
        _J.STOPPING: frozenset({_J.STOPPED}),
        _J.STOPPED: frozenset(),
    }
)
"""The phases that can follow each phase. `tests/core/diagram.py` says why they do."""

HOLDS_RANK = frozenset(_M) - {_M.STARTING, _M.READY, _M.PREPARING, _M.DISMISSED, _M.ENDED}
"""Phases of members that can hold a rank (`RAISED` and `ENDING` hold it until they are reaped)."""
PARKED = frozenset({_M.STARTING, _M.READY, _M.PREPARING})
ATTACHED = frozenset({_M.RUNNING, _M.FINISHED})
AT_WORK_IN_REPAIR = frozenset(
    {
        *(_M.ABORTING, _M.RECALLED, _M.UNWINDING, _M.RE_ENTERING),
        *(_M.REHEARSING, _M.RESTORING, _M.ATTACHING),
    }
)
"""Phases in which a repair waits for the member, so that it must show progress."""
TIMED = AT_WORK_IN_REPAIR | {_M.ENDING, _M.RAISED, _M.UNATTACHED, _M.STARTING, _M.PREPARING}
"""Phases with a time limit of their own."""


def trigger_of(moved_by: ev.Event | do.Effect) -> Trigger | None:
    """Return the table's key for an event or an order; None for an order that moves no member (an injected fault)."""
    if isinstance(moved_by, do.AssignRank) and moved_by.replacement:
        return ReplacementAssigned
    if isinstance(moved_by, do.KillWorker) and moved_by.injected:
        return None
    return type(moved_by)
