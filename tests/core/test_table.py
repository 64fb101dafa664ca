"""Every event in every phase: never an exception, invariants hold, and it acts as the tables say or not at all."""

import copy
import dataclasses
import functools
import random
from collections import deque
from collections.abc import Iterator
from typing import get_args

import pytest
from diagram import diagram
from kit.invariants import check_invariants

from deadpool_run.core import coordinator, timers
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.injection import KillHow
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import spare_pool
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import (
    HOLDS_RANK,
    JOB_TRANSITIONS,
    MEMBER_TRANSITIONS,
    TIMED,
    JobPhase,
    MemberPhase,
    ReplacementAssigned,
    trigger_of,
)
from deadpool_run.ids import ONLY_NODE

SETTINGS = Settings(world_size=2, spares=1, hot_spares=True, max_restarts=1)
MOST_STATES = 2000
NOW = 1000.0

pytestmark = pytest.mark.xdist_group("table")  # the states are explored once


def events_of_worker(state: State, worker: int, epoch: int) -> Iterator[ev.Event]:
    yield ev.WorkerStarted(worker, 4242)
    yield ev.WorkerReady(worker)
    yield ev.SparePrepared(worker)
    yield ev.PrepareFailed(worker, "x")
    yield ev.WorkerStartFailed(worker, "no memory")
    yield ev.ScriptInitialized(worker)
    yield ev.SetupCompleted(worker)
    yield ev.TranscriptCompleted(worker)
    yield ev.WorkerRaised(worker, 5, "ValueError", "x", "Traceback")
    yield ev.JobRefused(worker, "x", 94)
    yield ev.LoopBypassed(worker)
    yield ev.WorkerExited(worker, 0, None, (4, 5))
    yield ev.WorkerExited(worker, 1, None, (4, 5))
    yield ev.WorkerExited(worker, None, 9, (4, 5))
    yield ev.AbortCompleted(worker, epoch, 5, 5, (4, 5))
    yield ev.AbortCompleted(worker, epoch, 5, None, (4, 5))
    yield ev.AbortFailed(worker, epoch, "x")
    yield ev.AbortFailed(worker, epoch, "x", again=True)
    yield ev.RunUnwound(worker, 5, (4, 5))
    yield ev.ReplacementRehearsed(worker, epoch)
    yield ev.RankRestored(worker, epoch)
    yield ev.RankAttached(worker, epoch)
    yield ev.AttachFailed(worker, epoch, "x")
    yield ev.FirstStepCompleted(worker, epoch)
    yield ev.CollectiveFailed(worker, epoch, "x")
    yield ev.CaptureSkipped(worker, 7)
    yield ev.StepsLimited(worker, epoch, 6)
    yield ev.StepsLimited(worker, epoch, 6, reached=True, captured=True)
    yield ev.LoopFinished(worker, 20)
    yield ev.WorkerHung(worker, "x")


EVENTS_OF_JOB = (
    ev.JobSubmitted(),
    ev.StopRequested(15),
    ev.StopRequested(0),
    ev.KillRequested(0, KillHow.SIGKILL),
    ev.KillRequested(9, KillHow.EXIT),
    ev.KillRequested(-1, KillHow.SIGKILL, 2),
    ev.SlowRequested(0, 3.0, 60.0),
    ev.SlowRequested(9, 3.0, 60.0),
    ev.SlowRequested(0, 1.0, 60.0),
    ev.AgentKillRequested(""),
    ev.AgentKillRequested("elsewhere"),
    ev.DrainRequested(rank=0),
    ev.DrainRequested(node=""),
    ev.TimeAdvanced(),
    ev.CopyRefused("", 0),
    ev.DeviceFailed(ONLY_NODE, 0, "XID 79"),
    ev.DeviceFailed("elsewhere", 0, "XID 79"),
    ev.RefusedCopyTaken("", 0),
)


def all_events(state: State) -> Iterator[ev.Event]:
    yield from EVENTS_OF_JOB
    for worker in [*state.members, state.next_worker + 7]:
        yield from events_of_worker(state, worker, state.epoch)


def signature(state: State) -> tuple[object, ...]:
    """The part of a state by which two states differ for the search."""
    ranked = sorted((member.phase, member.replacement) for member in state.owners())
    seats = sorted((seat.done, seat.rehearsable) for seat in state.seats)
    parked = (
        min(2, len(state.in_phase(MemberPhase.READY))),
        bool(state.in_phase(MemberPhase.DISMISSED)),
        bool(state.in_phase(MemberPhase.PREPARING)),
    )
    chosen = state.repair is not None and state.repair.resume is not None
    drain = None if state.relocation is None or state.phase is not JobPhase.RUNNING else state.relocation.is_set
    return state.phase, tuple(ranked), tuple(seats), parked, chosen, state.suspicion is None, drain


@dataclasses.dataclass(frozen=True)
class Decision:
    """One call of `step`, and what came of it."""

    state: State
    event: ev.Event
    after: State
    effects: tuple[do.Effect, ...]

    @property
    def member(self) -> Member | None:
        """Of whom the event told, as it was before."""
        return self.state.members.get(getattr(self.event, "worker", None))


def copied(state: State) -> State:
    """Return an independent copy. A `deepcopy` would take a hundred times as long as a step."""
    return dataclasses.replace(
        state,
        members={worker: copy.copy(member) for worker, member in state.members.items()},
        seats=tuple(map(copy.copy, state.seats)),
        repair=copy.copy(state.repair),
        move=copy.deepcopy(state.move),
        relocation=copy.deepcopy(state.relocation),
        failures=copy.deepcopy(state.failures),
        crashes=dict(state.crashes),
        never_ready=dict(state.never_ready),
    )


def stepped(settings: Settings, state: State, event: ev.Event, now: float) -> tuple[State, tuple[do.Effect, ...]]:
    """Take the step on a copy of the state."""
    after = copied(state)
    effects = coordinator.step(settings, after, event, now)
    return after, effects


@functools.cache
def decisions() -> tuple[Decision, ...]:
    """Every event in every state that events lead to, breadth first."""
    first = coordinator.new_state(SETTINGS)
    seen, queue, made = {signature(first)}, deque([first]), []
    while queue:
        state = queue.popleft()
        draft = copied(state)
        for event in all_events(state):
            now = coordinator.next_deadline(SETTINGS, state) if isinstance(event, ev.TimeAdvanced) else None
            effects = coordinator.step(SETTINGS, draft, event, NOW if now is None else now)
            after = state
            if draft != state:
                after, draft = draft, copied(state)
            made.append(Decision(state, event, after, effects))
            if signature(after) not in seen:
                seen.add(signature(after))
                queue.append(after)
        assert len(seen) < MOST_STATES, "the signature tells too many states apart"
    return tuple(made)


def states() -> list[State]:
    return list({id(one.state): one.state for one in decisions()}.values())


def test_every_phase_of_job_and_members_is_explored():
    assert {state.phase for state in states()} == set(JobPhase)
    assert {m.phase for state in states() for m in state.members.values()} == set(MemberPhase) - {MemberPhase.ENDED}
    facts = {
        (fact, phase) for phase, row in MEMBER_TRANSITIONS.items() for fact in row if fact.__module__.endswith("events")
    }
    assert facts <= {(type(one.event), one.member.phase) for one in decisions() if one.member is not None}


def test_the_job_moves_along_its_table():
    """Several phases may be passed in one step, so that a move is a path in the table; each edge is an own move too."""
    moves = {(one.state.phase, one.after.phase) for one in decisions()}
    for start, end in moves:
        reach = {start}
        for _ in JobPhase:
            reach |= {target for phase in reach for target in JOB_TRANSITIONS[phase]}
        assert end in reach
    # NEW -> STOPPING passes on to STOPPED at once, as there is nobody to wait for. In this exploration what dies leaves
    # its snapshots, so that nobody has to begin again from a durable checkpoint: scripts/durable.txt does.
    edges = {(phase, target) for phase, row in JOB_TRANSITIONS.items() for target in row}
    assert edges - moves == {(JobPhase.NEW, JobPhase.STOPPING), (JobPhase.REPAIRING, JobPhase.RESTARTING)}


def test_every_event_in_every_state_keeps_the_invariants():
    for one in decisions():
        if one.after != one.state:
            check_invariants(SETTINGS, one.after)
        check_orders(one.after, one.effects)
        assert one.after.epoch >= one.state.epoch


def check_orders(after: State, effects: tuple[do.Effect, ...]) -> None:
    assert sum(isinstance(effect, do.StopJob) for effect in effects) == (
        after.phase is JobPhase.STOPPED and bool(effects)
    )
    for effect in effects:
        if isinstance(effect, (do.AssignRank, do.AbortStep, do.ResumeFrom, do.AttachGroups)):
            assert effect.epoch == after.epoch
        if isinstance(effect, (do.Announce, do.KillWorker, do.StopJob)):
            assert effect.reason


def test_a_fact_moves_its_member_as_the_table_says_or_nothing():
    for one in decisions():
        # The pid of WorkerStarted is noted in any phase.
        if type(one.event) not in map(type, (*EVENTS_OF_JOB, ev.WorkerStarted(0, 0))):
            check_fact(one)


def is_void(event: ev.Event, member: Member) -> bool:
    """Whether the member may not send this event, though its phase allows it."""
    match event:
        case ev.ReplacementRehearsed():
            return not member.replacement
        case ev.WorkerStartFailed():
            return member.rank is not None
        case _:
            return False


def check_fact(one: Decision) -> None:
    target = None if one.member is None else MEMBER_TRANSITIONS[one.member.phase].get(type(one.event))
    if target is None or is_void(one.event, one.member) or one.state.phase is JobPhase.STOPPED:
        assert (one.after, one.effects) == (one.state, ()), f"{one.event} acted on {one.member}"
        return
    worker = one.event.worker
    for effect in one.effects:  # orders of the same step move it on
        trigger = trigger_of(effect)
        if getattr(effect, "worker", None) == worker and trigger in MEMBER_TRANSITIONS[target]:
            target = MEMBER_TRANSITIONS[target][trigger]
    assert (one.after.members[worker].phase if worker in one.after.members else MemberPhase.ENDED) is target


@pytest.mark.parametrize("off", [-1, 1])
def test_what_is_said_in_another_epoch_changes_nothing(off):
    for state in states():
        after = copied(state)
        for worker in state.members:
            for event in events_of_worker(state, worker, state.epoch + off):
                if hasattr(event, "epoch"):
                    assert coordinator.step(SETTINGS, after, event, NOW) == ()
                    assert after == state, event


def test_a_deadline_that_is_reached_is_over():
    """A quarter of the states, other ones in each run."""
    for state in states()[random.randrange(4) :: 4]:
        now = NOW
        while (deadline := coordinator.next_deadline(SETTINGS, state)) is not None and now < NOW + 1000:
            assert stepped(SETTINGS, state, ev.TimeAdvanced(), now)[0] == state or deadline <= now
            now = max(now, deadline)
            state, _ = stepped(SETTINGS, state, ev.TimeAdvanced(), now)  # noqa: PLW2901 - time goes on
            check_invariants(SETTINGS, state)
            after = coordinator.next_deadline(SETTINGS, state)
            assert after is None or after > now, "time stands still"


def test_every_event_has_a_handler():
    assert coordinator.HANDLERS.keys() == set(get_args(ev.Event))


def test_the_phases_with_a_limit_are_those_whose_times_are_counted():
    assert set(timers.LIMITS) == TIMED


def test_an_attach_may_take_longer_in_a_large_world():
    def limit_s(world_size, phase=MemberPhase.ATTACHING):
        settings = Settings(world_size=world_size)
        state = coordinator.new_state(settings)
        state.phase = JobPhase.REPAIRING
        return timers.LIMITS[phase].until(settings, state, 0.0)

    assert limit_s(8) == 60
    assert limit_s(512) == 92
    assert limit_s(4096) == 316
    assert limit_s(4096, MemberPhase.RESTORING) == 60


def test_a_step_that_raised_leaves_a_void_state(monkeypatch):
    state = coordinator.new_state(SETTINGS)
    monkeypatch.setattr(spare_pool, "heal", lambda _decision: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        coordinator.step(SETTINGS, state, ev.JobSubmitted(), NOW)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="half-way"):
        coordinator.step(SETTINGS, state, ev.TimeAdvanced(), NOW)


def test_an_attached_or_dying_member_never_comes_back_unnoticed():
    """The table itself: only orders lead into a repair, and a dying member is never anything but dying or dead."""
    into = {
        *(MemberPhase.ABORTING, MemberPhase.RECALLED, MemberPhase.UNWINDING),
        *(MemberPhase.RESTORING, MemberPhase.ATTACHING, MemberPhase.RELEASED),
    }
    for phase, row in MEMBER_TRANSITIONS.items():
        for trigger, target in row.items():
            if target in into and target is not phase:
                assert trigger.__module__.endswith("effects")
    assert set(MEMBER_TRANSITIONS[MemberPhase.ENDING].values()) == {MemberPhase.ENDING, MemberPhase.ENDED}
    for phase in HOLDS_RANK:
        assert do.AssignRank not in MEMBER_TRANSITIONS[phase]
        assert ReplacementAssigned not in MEMBER_TRANSITIONS[phase]


def test_the_diagram_shows_every_phase():
    text = diagram()
    for phase in (*JobPhase, *MemberPhase):
        assert phase.value.replace(" ", "_") in text


def test_a_refusal_stops_the_job_in_every_phase_in_which_its_worker_holds_a_rank():
    """Only a worker that is ordered to die is not heard; one that rehearses ahead of need holds no rank."""
    refused = [one for one in decisions() if isinstance(one.event, ev.JobRefused) and one.member is not None]
    assert {one.member.phase for one in refused} >= HOLDS_RANK
    for one in refused:
        heard = one.member.rank is not None and one.member.phase is not MemberPhase.ENDING
        if one.state.phase in (JobPhase.STOPPING, JobPhase.STOPPED):
            continue
        assert (one.after.stop is not None) == heard
        if heard:
            assert (one.after.stop.exit_code, one.after.stop.reason) == (94, "x")
            assert not any(isinstance(effect, (do.StartWorker, do.AssignRank, do.AbortStep)) for effect in one.effects)


def test_a_refusal_of_a_spare_that_rehearses_ahead_of_need_gives_up_the_spare():
    spares = [
        one
        for one in decisions()
        if isinstance(one.event, ev.JobRefused) and one.member is not None and one.member.phase is MemberPhase.PREPARING
    ]
    assert spares
    for one in spares:
        assert one.after.phase is one.state.phase
        assert one.after.unpreparable
        reasons = [effect.reason for effect in one.effects if isinstance(effect, do.Announce)]
        assert reasons[0] == "x"  # a drain may end, which needs the spare
        assert len(reasons) == 1 + (one.state.relocation is not None and one.after.relocation is None)
        assert one.after.members[one.member.worker].phase is MemberPhase.DISMISSED
