"""The coordinator moves, in every state that events lead to, to find what was known, less, more, or something else."""

import dataclasses
import random

import pytest
from kit.invariants import check_invariants
from msgspec import structs
from test_table import NOW, SETTINGS, states, stepped

from deadpool_run.core import coordinator, places
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import holders
from deadpool_run.core.state import NodeRecord, State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import ONLY_NODE

pytestmark = pytest.mark.xdist_group("table")  # with test_table.py: the states are explored once

NODE = ONLY_NODE
OTHER = NodeRecord("n2", ev.Place(), 1)
AFTER = NOW + 1000.0


def step(state: State, *events: ev.Event, now: float = AFTER) -> tuple[State, list[do.Effect]]:
    orders: list[do.Effect] = []
    for event in events:
        before = state
        state, effects = stepped(SETTINGS, before, event, now)
        check_invariants(SETTINGS, state)
        assert state.epoch >= before.epoch
        assert state.term >= before.term
        orders += effects
    return state, orders


def as_known(state: State) -> list[ev.WorkerFound]:
    return [
        ev.WorkerFound(
            member.worker,
            100 + member.worker,
            rank=-1 if member.rank is None else member.rank,
            epoch=0 if member.rank is None else state.epoch,
            ready=member.phase is not MemberPhase.STARTING,
            prepared=member.phase is MemberPhase.PREPARING or (member.rank is None and member.prepared is not None),
            initialized=state.managed,
            rehearsed=member.replacement and member.phase is not MemberPhase.REHEARSING,
            finished=member.phase is MemberPhase.FINISHED,
            released=member.phase is MemberPhase.RELEASED,
        )
        for member in state.members.values()
    ]


def moved_states() -> list[State]:
    return [state for state in states() if state.phase not in (JobPhase.NEW, JobPhase.STOPPED)]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_new_leader_hears_of_gpus_that_failed(is_late):
    """Its log may lack what the driver reported to the last one. An eighth of the states, other ones in each run, is enough."""
    for state in moved_states()[random.randrange(8) :: 8]:
        found = ev.NodeResynced(NODE, tuple(as_known(state)), failed_devices=((1, "XID 79"),))
        moved = [ev.CoordinatorMoved(7, NODE), structs.replace(found, failed_devices=())] if is_late else []
        after, orders = step(state, *(moved or [ev.CoordinatorMoved(7, NODE)]), found)
        if after.phase is not JobPhase.STOPPED:
            assert places.is_bad(after, NODE, 1)
            assert any(isinstance(order, do.Announce) and order.reason == "XID 79" for order in orders)


def test_a_move_to_what_was_known_keeps_every_survivor():
    term = 7
    for state in moved_states():
        after, orders = step(state, ev.CoordinatorMoved(term, NODE), ev.NodeResynced(NODE, tuple(as_known(state))))
        assert after.move is None
        assert after.epoch > max(state.epoch, term << 20)
        assert after.next_worker >= term << 20
        if state.phase in (JobPhase.RUNNING, JobPhase.REPAIRING) and not any(w.released for w in as_known(state)):
            kept = {m.worker for m in state.owners() if m.phase is not MemberPhase.ENDING}
            assert kept <= set(after.members) or after.phase is JobPhase.STOPPING
        for order in orders:
            if isinstance(order, (do.AssignRank, do.AbortStep, do.ResumeFrom, do.AttachGroups)):
                assert order.epoch > term << 20


def test_only_workers_with_another_capture_interval_are_told():
    """A new leader of ten thousand machines would send an order to each rank, of which none changes anything."""
    told = 0
    for state in moved_states():
        known = [structs.replace(found, interval=state.capture_interval) for found in as_known(state)]
        for index in (-1, 0):
            found = [structs.replace(each, interval=9) if at == index else each for at, each in enumerate(known)]
            _, orders = step(state, ev.CoordinatorMoved(1, NODE), ev.NodeResynced(NODE, tuple(found)))
            orders = [order for order in orders if isinstance(order, do.SetCaptureInterval)]
            assert {order.worker for order in orders} <= {each.worker for each in found if each.interval == 9}
            told += len(orders)
    assert told


def test_nothing_is_decided_before_every_node_has_told():
    for state in moved_states():
        waiting, orders = step(state, ev.CoordinatorMoved(1, NODE))
        assert all(isinstance(order, do.Announce) for order in orders)
        told = [ev.WorkerExited(worker, None, 9, (4, 5)) for worker in state.members]
        waiting, orders = step(waiting, *told, ev.StopRequested(15))
        assert not orders
        assert waiting.members == state.members
        assert coordinator.next_deadline(SETTINGS, waiting) == AFTER + SETTINGS.node_timeout_s
        after, _ = step(waiting, ev.NodeResynced(NODE, tuple(as_known(state))))
        assert after.phase in (JobPhase.STOPPING, JobPhase.STOPPED, JobPhase.FINISHING)


def test_a_worker_that_ended_while_nodes_were_waited_for_is_not_taken_for_alive():
    for state in moved_states():
        exited = [ev.WorkerExited(worker, 0, None, (4, 5)) for worker in state.members]
        found = tuple(as_known(state))
        waiting, _ = step(dataclasses.replace(state, nodes={**state.nodes, "n2": OTHER}), ev.CoordinatorMoved(1, NODE))
        waiting, orders = step(waiting, ev.NodeResynced(NODE, found), *exited)
        assert not orders
        after, orders = step(waiting, ev.NodeResynced("n2", ()))
        ordered = {order.worker for order in orders if isinstance(order, (do.AssignRank, do.AbortStep, do.KillWorker))}
        assert not ordered & set(state.members)
        assert not set(after.members) & set(state.members)


def test_an_inventory_that_comes_late_counts_until_the_clock_has_been_heard():
    """The leader may have had no lease meanwhile: what came is handled first, and then the time that passed."""
    late = AFTER + SETTINGS.node_timeout_s
    for state in moved_states():
        two = dataclasses.replace(state, nodes={**state.nodes, "n2": OTHER})
        waiting, _ = step(two, ev.CoordinatorMoved(1, NODE))
        waiting, orders = step(waiting, ev.NodeResynced(NODE, tuple(as_known(state))), now=late)
        assert waiting.move is not None
        assert not orders
        after, _ = step(waiting, ev.NodeResynced("n2", ()), now=late)
        assert after.move is None
        assert "n2" in after.nodes or after.phase is JobPhase.STOPPED


def test_a_node_that_missed_several_orders_to_discard_is_given_all_of_them():
    """Between the first and the last, the job has used the same numbers again: what is between them may be of the old line."""
    state = next(state for state in moved_states() if state.phase is JobPhase.RUNNING)
    state = dataclasses.replace(state, nodes={**state.nodes, "n2": OTHER})
    knows = ev.NodeResynced(NODE, tuple(as_known(state)), discarded=(9, 30), earlier=((2, 5), (4, 10), (6, 20)))
    _, orders = step(state, ev.CoordinatorMoved(7, NODE), knows, ev.NodeResynced("n2", (), discarded=(4, 10)))
    discards = [(order.epoch, order.version) for order in orders if isinstance(order, do.DiscardAbove)]
    assert discards == [(6, 20), (9, 30)]


def test_a_node_that_does_not_tell_is_lost():
    for state in moved_states():
        waiting, _ = step(state, ev.CoordinatorMoved(1, NODE))
        after, _ = step(waiting, ev.TimeAdvanced(), now=AFTER + SETTINGS.node_timeout_s)
        assert after.move is None
        assert not after.nodes
        assert not after.members


@pytest.mark.parametrize("rank", [-1, 0])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_worker_that_nobody_knows(rank, missing):
    """It is ended, or owns its rank where that can be repaired; and never are there two owners."""
    for state in moved_states():
        epoch = max(state.epoch, 1) + 1
        stranger = ev.WorkerFound(state.next_worker + 3, 4242, rank, epoch, ready=True, initialized=True)
        found = (*as_known(state)[missing:], stranger)
        after, orders = step(state, ev.CoordinatorMoved(1, NODE), ev.NodeResynced(NODE, found))
        if after.phase in (JobPhase.STOPPING, JobPhase.STOPPED):
            continue
        killed = any(isinstance(order, do.KillWorker) and order.worker == stranger.worker for order in orders)
        owns = rank >= 0 and after.seats[rank].owner == stranger.worker
        assert killed != owns
        assert owns <= (state.phase in (JobPhase.RUNNING, JobPhase.REPAIRING))


@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_replacement_that_set_up_beside_the_last_coordinator(rehearsed):
    """Its store is gone: it is ended at once, and its rank waits for its end, unless it needs the store no more."""
    seen = 0
    for state in moved_states():
        rehearsing = {m.worker: m.rank for m in state.owners() if m.phase is MemberPhase.REHEARSING}
        found = [
            structs.replace(each, rehearsed=rehearsed) if each.worker in rehearsing else each
            for each in as_known(state)
        ]
        after, orders = step(state, ev.CoordinatorMoved(1, NODE), ev.NodeResynced(NODE, tuple(found)))
        if after.phase is not JobPhase.REPAIRING:
            continue
        killed = {order.worker for order in orders if isinstance(order, do.KillWorker)}
        assert killed.isdisjoint(rehearsing) if rehearsed else killed >= set(rehearsing)
        for worker, rank in rehearsing.items():
            seen += 1
            assert (after.seats[rank].owner == worker) == rehearsed
            assert rehearsed or after.members[worker].claimed == rank
            later, _ = step(after, ev.WorkerExited(worker, None, 9))
            assert later.epoch == after.epoch or rehearsed, "its end is no loss"
    assert seen


@pytest.mark.parametrize("owners_live", [True, False])
def test_a_spare_that_was_sent_home_is_given_nothing(owners_live):
    seen = 0
    for state in moved_states():
        parked = {member.worker for member in state.in_phase(MemberPhase.READY)}
        found = [
            structs.replace(each, dismissed=each.worker in parked)
            for each in as_known(state)
            if each.worker in parked or owners_live
        ]
        after, orders = step(state, ev.CoordinatorMoved(1, NODE), ev.NodeResynced(NODE, tuple(found)))
        assert not any(isinstance(order, do.AssignRank) and order.worker in parked for order in orders)
        left = parked & set(after.members)
        assert all(after.members[w].phase in (MemberPhase.DISMISSED, MemberPhase.ENDING) for w in left)
        seen += len(parked)
    assert seen


def test_a_spare_whose_order_to_rehearse_the_log_lacks_begins_no_new_world():
    ended = 0
    for state in moved_states():
        if state.phase is not JobPhase.SETTING_UP:
            continue
        for spare in [member for member in state.members.values() if member.phase is MemberPhase.READY]:
            known = [structs.replace(each, prepared=each.worker == spare.worker) for each in as_known(state)]
            after, orders = step(state, ev.CoordinatorMoved(7, NODE), ev.NodeResynced(NODE, tuple(known)))
            assert after.phase in (JobPhase.RESTARTING, JobPhase.STOPPING)
            assert spare.worker in [
                order.worker for order in orders if isinstance(order, do.KillWorker | do.TerminateWorker)
            ]
            ended += after.phase is JobPhase.RESTARTING
    assert ended


def test_a_slowed_rank_is_slowed_for_the_rest_of_its_time_under_the_new_leader():
    """Otherwise its slowness would pass for a hang, or a hang for its slowness."""
    seen = 0
    for state in moved_states():
        owner = state.owner(0)
        if state.phase is not JobPhase.RUNNING or owner is None or owner.phase is MemberPhase.ENDING:
            continue
        slowed, _ = step(state, ev.SlowRequested(0, 3.0, 60.0), now=AFTER - 10.0)
        after, _ = step(slowed, ev.CoordinatorMoved(7, NODE), ev.NodeResynced(NODE, tuple(as_known(slowed))))
        if (kept := after.owner(0)) is not None and kept.worker == owner.worker:
            assert (kept.slowness(AFTER + 49.0), kept.slowness(AFTER + 50.0)) == (3.0, 1.0)
            seen += 1
    assert seen


def test_a_smaller_term_changes_nothing():
    for state in moved_states():
        later, _ = step(state, ev.CoordinatorMoved(3, NODE), ev.NodeResynced(NODE, tuple(as_known(state))))
        for term in (1, 3):
            assert stepped(SETTINGS, later, ev.CoordinatorMoved(term, NODE), AFTER) == (later, ())


def test_a_stop_that_may_not_have_been_performed_is_ordered_again():
    for state in states():
        if state.phase is JobPhase.STOPPED:
            assert state.stop is not None
            _, orders = step(state, ev.CoordinatorMoved(1, NODE))
            assert orders == [do.StopJob(state.stop.exit_code, state.stop.reason)]


def test_what_lies_where_a_rank_lived_long_ago_is_left_out():
    """A replacement there would be told that its state is at hand, and its old slots would pass for its rank's."""
    far, old, lagging = frozenset({16, 20}), frozenset({3, 6}), frozenset({12, 16})
    assert holders._of_the_last_stay({"n1": old, "n3": far, "n4": lagging}) == {"n3": far, "n4": lagging}
    assert holders._of_the_last_stay({}) == {}
