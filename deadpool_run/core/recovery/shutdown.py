"""The end of a job: every rank has finished, or there is a reason to stop."""

from signal import SIGTERM, Signals

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import places
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.state import JobEnd
from deadpool_run.core.transitions import JobPhase, MemberPhase

UNREAPED_S = 30.0
"""How long a killed process may take to end. After that it may sleep in the kernel for ever."""
ECHO_S = 3.0
"""On several nodes, a second request to stop counts only this time after the first."""
KILLS = 2
"""How often a process gets SIGKILL before it is abandoned."""


def describe_exit(code: int | None, signal: int | None) -> str:
    """Return how a process ended, in words. One of the two is None."""
    return f"exited with code {code}" if signal is None else f"was killed by {_name_of(signal)}"


def _name_of(signal: int) -> str:
    return Signals(signal).name if signal in set(Signals) else f"signal {signal}"


def stop(decision: Decision, exit_code: int, reason: str, signal: int = SIGTERM) -> None:
    """End every worker, then the job. Only the first reason counts."""
    if decision.state.phase in (JobPhase.STOPPING, JobPhase.STOPPED):
        return
    decision.enter(JobPhase.STOPPING, reason)
    state = decision.state
    state.stop, state.repair, state.suspicion = JobEnd(exit_code, reason), None, None
    state.relocation = None
    decision.announce("stopping the job", reason)
    for member in state.members.values():
        if member.phase is not MemberPhase.ENDING:
            decision.terminate(member.worker, signal, reason)


def stop_requested(decision: Decision, event: ev.StopRequested) -> None:
    """Stop the job; at the second request, kill every worker."""
    if decision.state.phase is JobPhase.STOPPING:
        if not _is_echo(decision):
            for worker in decision.state.members:
                decision.kill(worker, "asked to stop a second time")
    elif decision.state.phase is not JobPhase.STOPPED:
        reason = f"stopped by {_name_of(event.signal)}" if event.signal else "asked to stop"
        stop(decision, event.exit_code, reason, event.signal or SIGTERM)


def _is_echo(decision: Decision) -> bool:
    """Tell whether this repeats the last request: a scheduler signals every node's agent, and each agent reports it."""
    if decision.settings.nodes + decision.settings.spare_nodes == 1:
        return False
    began_at = max((member.since for member in decision.state.in_phase(MemberPhase.ENDING)), default=decision.now)
    return decision.now - began_at < ECHO_S


def unreaped(decision: Decision, member: Member) -> None:
    """Abandon a killed process that does not end, and count its place as bad. It runs no code of the script any more."""
    why = f"worker {member.worker} (pid {member.pid}) was killed but does not end: it may hang in the kernel"
    if decision.state.phase is not JobPhase.STOPPING:
        decision.announce(f"worker {member.worker} is left behind", why)
        if member.rank is not None:
            places.condemn(decision.state, member.node, decision.state.seats[member.rank].local_rank)
        decision.order(do.AbandonWorker(member.worker))
    elif member.kills < KILLS:
        decision.kill(member.worker, why)
    else:
        decision.announce(f"worker {member.worker} is left behind", why)
        decision.remove(member)


def release(decision: Decision) -> None:
    """Let every rank leave its loop, since the last version of each is safe."""
    decision.enter(JobPhase.FINISHING, "every rank is done")
    decision.state.repair = decision.state.suspicion = decision.state.relocation = None
    members = decision.state.in_phase(MemberPhase.FINISHED)
    versions = sorted({str(member.finished) for member in members})
    if len(versions) > 1:
        decision.announce("ranks finished after different numbers of steps", ", ".join(versions))
    for member in members:
        decision.order(do.ReleaseWorker(member.worker))


def advance_finishing(decision: Decision) -> None:
    """Dismiss parked workers; end the job when no worker is left."""
    state = decision.state
    for member in state.in_phase(MemberPhase.READY, MemberPhase.PREPARING):
        decision.order(do.DismissWorker(member.worker))
    if state.done_at is None and state.seat_counters.done == len(state.seats):
        state.done_at = decision.now
    if not state.members:
        _stopped(decision, 0, "every rank finished")


def advance_stopping(decision: Decision) -> None:
    """End the job when no worker is left."""
    assert decision.state.stop is not None
    if not decision.state.members:
        _stopped(decision, decision.state.stop.exit_code, decision.state.stop.reason)


def _stopped(decision: Decision, exit_code: int, reason: str) -> None:
    decision.enter(JobPhase.STOPPED, reason)
    decision.state.stop = decision.state.stop or JobEnd(exit_code, reason)
    decision.effects.append(do.StopJob(exit_code, reason))
