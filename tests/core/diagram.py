"""The state diagrams of docs/how-recovery-works.md; run this module to print them."""

from collections.abc import Iterator
from enum import StrEnum

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.transitions import (
    JOB_TRANSITIONS,
    MEMBER_TRANSITIONS,
    JobPhase,
    MemberPhase,
    ReplacementAssigned,
)

_J = JobPhase
_WHY = {
    (_J.NEW, _J.STARTING): "submitted",
    (_J.NEW, _J.STOPPING): "stop",
    (_J.STARTING, _J.SETTING_UP): "enough workers are ready",
    (_J.STARTING, _J.STOPPING): "stop",
    (_J.SETTING_UP, _J.RUNNING): "every rank can be rehearsed",
    (_J.SETTING_UP, _J.RESTARTING): "a rank was lost",
    (_J.SETTING_UP, _J.FINISHING): "every rank is done",
    (_J.SETTING_UP, _J.STOPPING): "stop",
    (_J.RUNNING, _J.REPAIRING): "a rank was lost",
    (_J.RUNNING, _J.FINISHING): "every rank is done",
    (_J.RUNNING, _J.STOPPING): "stop",
    (_J.REPAIRING, _J.RUNNING): "every rank is attached",
    (_J.REPAIRING, _J.RESTARTING): "every holder is gone, and checkpoints are durable",
    (_J.REPAIRING, _J.STOPPING): "stop",
    (_J.RESTARTING, _J.STARTING): "every rank has ended",
    (_J.RESTARTING, _J.STOPPING): "stop",
    (_J.FINISHING, _J.STOPPED): "every worker has exited 0",
    (_J.FINISHING, _J.REPAIRING): "a rank was lost after its release",
    (_J.FINISHING, _J.STOPPING): "stop",
    (_J.STOPPING, _J.STOPPED): "every worker has ended",
}
"""Why each phase of the job can follow another, in the order of the diagram."""


def diagram() -> str:
    """Return both machines as mermaid state diagrams, for the documentation."""
    return "\n".join((*_job_diagram(), "", *_member_diagram()))


def _name(phase: StrEnum) -> str:
    return phase.value.replace(" ", "_")


def _job_diagram() -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {_name(JobPhase.NEW)}"
    assert {(phase, target) for phase, targets in JOB_TRANSITIONS.items() for target in targets} == _WHY.keys()
    for (phase, target), why in _WHY.items():
        yield f"    {_name(phase)} --> {_name(target)}: {why}"
    yield f"    {_name(JobPhase.STOPPED)} --> [*]"
    yield "```"


def _member_diagram() -> Iterator[str]:
    """Show raising, being killed and exiting, which are possible in every phase, only in a few."""
    anywhere = {ev.WorkerExited, ev.WorkerHung, ev.WorkerRaised, ev.JobRefused, do.KillWorker, do.TerminateWorker}
    told_apart = {
        MemberPhase.RUNNING,
        MemberPhase.RELEASED,
        MemberPhase.DISMISSED,
        MemberPhase.RAISED,
        MemberPhase.ENDING,
    }
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {_name(MemberPhase.STARTING)}: StartWorker"
    for phase, moves in MEMBER_TRANSITIONS.items():
        for trigger, target in moves.items():
            if target is not phase and (trigger not in anywhere or phase in told_apart):
                label = "AssignRank as replacement" if trigger is ReplacementAssigned else trigger.__name__
                yield f"    {_name(phase)} --> {_name(target)}: {label}"
    yield f"    {_name(MemberPhase.ENDED)} --> [*]"
    yield f"    note right of {_name(MemberPhase.RUNNING)}: what raises, ends or kills it here does so in every other phase too"
    yield "```"


if __name__ == "__main__":
    print(diagram())
