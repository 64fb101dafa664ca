"""How a job ends: by finishing, or by a stop that has a reason."""

from signal import SIGTERM, Signals

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.state import Member, Stop, all_done
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.core.turn import Turn

UNREAPED_S = 30.0
"""A killed process that is not reaped within so long may never be (it sleeps uninterruptibly)."""
ECHO_S = 3.0
"""On several nodes a second request to stop counts as one only so long after the first."""
KILLS = 2
"""So often a process is killed before it is left behind."""


def describe_exit(exited: ev.WorkerExited) -> str:
    """Return how a process ended, in words."""
    if exited.signal is None:
        return f"exited with code {exited.code}"
    try:
        return f"was killed by {Signals(exited.signal).name}"
    except ValueError:
        return f"was killed by signal {exited.signal}"


def stop(turn: Turn, exit_code: int, reason: str, signal: int = SIGTERM) -> None:
    """End every worker, then the job. The first reason stands."""
    if turn.state.phase in (JobPhase.STOPPING, JobPhase.STOPPED):
        return
    turn.enter(JobPhase.STOPPING, reason)
    turn.set(stop=Stop(exit_code, reason), repair=None, suspicion=None)
    turn.announce("stopping the job", reason)
    with turn.for_all():
        for member in turn.state.members.values():
            if member.phase is not MemberPhase.ENDING:
                turn.terminate(member.worker, signal, reason)


def stop_requested(turn: Turn, event: ev.StopRequested) -> None:
    """Begin to stop; asked a second time, end everyone outright."""
    if turn.state.phase is JobPhase.STOPPING:
        if not _is_echo(turn):
            kill_all(turn, "asked to stop a second time")
    elif turn.state.phase is not JobPhase.STOPPED:
        name = Signals(event.signal).name if event.signal in set(Signals) else f"signal {event.signal}"
        reason = f"stopped by {name}" if event.signal else "asked to stop"
        stop(turn, event.exit_code, reason, event.signal or SIGTERM)


def _is_echo(turn: Turn) -> bool:
    """Return whether this is the same request again: a scheduler signals every node's agent, and each says so."""
    if turn.settings.nodes + turn.settings.spare_nodes == 1:
        return False
    began_at = max((member.since for member in turn.state.in_phase(MemberPhase.ENDING)), default=turn.now)
    return turn.now - began_at < ECHO_S


def kill_all(turn: Turn, reason: str) -> None:
    """End whoever is left outright."""
    with turn.for_all():
        for worker in turn.state.members:
            turn.kill(worker, reason)


def unreaped(turn: Turn, member: Member) -> None:
    """Stop a job in which a process was ordered to die and is not reaped; in the end, leave it behind."""
    why = f"worker {member.worker} (pid {member.pid}) was killed but does not end: it may hang in the kernel"
    if turn.state.phase is not JobPhase.STOPPING:
        stop(turn, 1, why)
    if member.kills < KILLS:
        turn.kill(member.worker, why)
    else:
        turn.announce(f"worker {member.worker} is left behind", why)
        turn.remove(member)


def release(turn: Turn) -> None:
    """Let every rank leave its loop, once the last version of all is safe, and send the spares home."""
    finished = {member.finished for member in turn.state.owners() if member.phase is MemberPhase.FINISHED}
    turn.enter(JobPhase.FINISHING, "every rank is done")
    turn.set(repair=None, suspicion=None)
    if len(finished) > 1:
        turn.announce(
            "ranks finished after different numbers of steps",
            ", ".join(str(version) for version in sorted(finished, key=str)),
        )
    with turn.for_all():
        for member in turn.state.in_phase(MemberPhase.FINISHED):
            turn.order(do.ReleaseWorker(member.worker))


def advance_finishing(turn: Turn) -> None:
    """Dismiss whoever is parked; end the job when nobody is left."""
    if parked := turn.state.in_phase(MemberPhase.READY, MemberPhase.PREPARING):
        with turn.for_all():
            for member in parked:
                turn.order(do.DismissWorker(member.worker))
    if all_done(turn.state) and turn.state.done_at is None:
        turn.set(done_at=turn.now)
    if not turn.state.members:
        _stopped(turn, 0, "every rank finished")


def advance_stopping(turn: Turn) -> None:
    """End the job when nobody is left."""
    assert turn.state.stop is not None
    if not turn.state.members:
        _stopped(turn, turn.state.stop.exit_code, turn.state.stop.reason)


def _stopped(turn: Turn, exit_code: int, reason: str) -> None:
    turn.enter(JobPhase.STOPPED, reason)
    turn.set(stop=turn.state.stop or Stop(exit_code, reason))
    turn.effects.append(do.StopJob(exit_code, reason))
