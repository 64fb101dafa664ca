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


def diagram() -> str:
    """Return both machines as mermaid state diagrams, for the documentation."""
    return "\n".join((*_job_diagram(), "", *_member_diagram()))


def _name(phase: StrEnum) -> str:
    return phase.value.replace(" ", "_")


def _job_diagram() -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {_name(JobPhase.NEW)}"
    for phase, targets in JOB_TRANSITIONS.items():
        for target, why in targets.items():
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
