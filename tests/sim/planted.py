"""Bugs that the simulator must find. Each replaces one small function of the core during a test.

If the simulator does not find one, the simulator is broken. No setting of the product can cause these bugs.
"""

from collections.abc import Callable
from dataclasses import replace

import agents
import node_side
import pytest
import storage
from outages import KINDS as OUTAGES
from simulations import KINDS, NODE_KINDS, REFUSAL_KINDS

from deadpool_run.core import coordinator, reports, timers
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import buddies, holders
from deadpool_run.core.decision import Decision
from deadpool_run.core.leadership import electorate, quorum, reconcile, takeover
from deadpool_run.core.recovery import repair, restart, retries, spare_pool
from deadpool_run.core.state import State
from deadpool_run.core.transitions import MEMBER_TRANSITIONS, MemberPhase

Plant = Callable[[pytest.MonkeyPatch], None]


def reports_of_old_epochs_are_accepted(patch):
    patch.setattr(reports, "is_current", lambda _state, _epoch: True)


def acks_are_kept_over_epochs(patch):
    honest = repair.recall

    def recall(decision, member):
        held, phase = decision.state.seats[member.rank].held, member.phase
        honest(decision, member)
        if phase in (MemberPhase.ABORTED, MemberPhase.REHEARSED):
            decision.set_member(member.worker, phase=phase)
            decision.set_seat(member.rank, held=held)

    patch.setattr(repair, "recall", recall)


def the_epoch_is_not_bumped(patch):
    honest = Decision.next_epoch
    patch.setattr(
        Decision, "next_epoch", lambda decision: decision.state.epoch if decision.state.repair else honest(decision)
    )


def the_resume_version_is_chosen_from_the_union(patch):
    patch.setattr(holders, "newest_common", lambda held: max(frozenset.union(*held), default=None))


def a_version_that_survivors_dropped_is_chosen(patch):
    patch.setattr(holders, "newest_common", lambda held: max(frozenset.intersection(*held), default=1) - 1)


def an_unready_spare_is_promoted(patch):
    honest = State.in_phase

    def in_phase(state, *phases):
        if phases == (MemberPhase.READY,):
            return honest(state, MemberPhase.STARTING, MemberPhase.READY)
        return honest(state, *phases)

    patch.setattr(State, "in_phase", in_phase)
    for trigger, target in MEMBER_TRANSITIONS[MemberPhase.READY].items():
        patch.setitem(MEMBER_TRANSITIONS[MemberPhase.STARTING], trigger, target)


def lost_spares_are_not_replaced(patch):
    honest = spare_pool.heal

    def heal(decision):
        if decision.state.next_worker == 0:
            honest(decision)

    patch.setattr(spare_pool, "heal", heal)


def a_dead_ranks_slots_are_ignored(patch):
    patch.setattr(holders, "held_after_death", lambda _exited: frozenset())


def a_live_version_is_counted_without_live_state(patch):
    patch.setattr(holders, "held_by_survivor", lambda aborted: frozenset({*aborted.captured, aborted.completed}))


def ranks_attach_before_all_are_restored(patch):
    def attach(decision):
        for member in decision.state.in_phase(MemberPhase.RESTORED):
            decision.order(do.AttachGroups(member.worker, decision.state.epoch))

    patch.setattr(repair, "_attach", attach)


def an_unkillable_worker_is_awaited(patch):
    limit = timers.LIMITS[MemberPhase.ENDING]
    patch.setitem(
        timers.LIMITS,
        MemberPhase.ENDING,
        replace(limit, expired=lambda decision, one: decision.kill(one.worker, "again")),
    )


def a_failed_collective_is_not_repaired(patch):
    patch.setattr(retries, "retry", lambda _decision, _reason: None)


def a_member_that_raised_counts_as_dead(patch):
    honest = repair.recall

    def recall(decision, member):
        if member.phase is MemberPhase.RAISED:
            decision.set_seat(member.rank, held=frozenset())
        else:
            honest(decision, member)

    patch.setattr(repair, "recall", recall)


def a_refusal_is_repaired_like_an_exception(patch):
    patch.setitem(coordinator.HANDLERS, ev.JobRefused, reports.accepted())


def copies_are_kept_on_the_ranks_own_node(patch):
    honest = buddies.choose

    def choose(settings, state):
        return tuple((seat.node,) for seat in state.seats) if honest(settings, state) else ()

    patch.setattr(buddies, "choose", choose)


def a_lost_holder_still_counts(patch):
    patch.setattr(holders, "forget", lambda _decision, _rank, _node: False)


def a_remote_snapshot_counts_as_local(patch):
    patch.setattr(holders, "nearest", lambda _seat, _member, _version: None)


def a_version_that_another_loss_may_need_is_dropped(patch):
    patch.setattr(storage.Storage, "may_need", lambda _storage, _version: False)


def the_job_is_protected_before_the_first_copies(patch):
    honest = restart.advance_setup

    def advance_setup(decision):
        decision.state.committed = True
        honest(decision)

    patch.setattr(restart, "advance_setup", advance_setup)


def an_unwound_ranks_versions_are_assumed(patch):
    honest = coordinator.HANDLERS[ev.RunUnwound]

    def unwound(decision, event):
        versions = tuple(range(event.completed + 1))
        honest(decision, ev.RunUnwound(event.worker, event.completed, versions))

    patch.setitem(coordinator.HANDLERS, ev.RunUnwound, unwound)


def a_re_entry_that_failed_is_tried_again(patch):
    patch.setattr(repair, "can_reenter", lambda member: member.phase is MemberPhase.ABORTING)
    honest = Decision.order

    def order(decision, given, **changes):
        honest(decision, given, **changes)
        if isinstance(given, do.AbortStep) and decision.state.members[given.worker].reentered:
            decision.set_member(given.worker, phase=MemberPhase.ABORTING)

    patch.setattr(Decision, "order", order)


def a_step_that_cannot_be_aborted_is_awaited(patch):
    patient = replace(
        timers.LIMITS[MemberPhase.ABORTING],
        expired=lambda decision, member: decision.set_member(member.worker, since=decision.now),
    )
    patch.setitem(timers.LIMITS, MemberPhase.ABORTING, patient)


def an_unwound_rank_counts_as_a_survivor(patch):
    patch.setitem(coordinator.HANDLERS, ev.RunUnwound, reports.accepted(repair.unwound))


_ANY = KINDS
PLANTS: dict[Plant, tuple[str, ...]] = {
    a_refusal_is_repaired_like_an_exception: REFUSAL_KINDS,
    acks_are_kept_over_epochs: _ANY,
    the_epoch_is_not_bumped: _ANY,
    the_resume_version_is_chosen_from_the_union: _ANY,
    a_version_that_survivors_dropped_is_chosen: _ANY,
    an_unready_spare_is_promoted: _ANY,
    lost_spares_are_not_replaced: _ANY,
    a_dead_ranks_slots_are_ignored: _ANY,
    ranks_attach_before_all_are_restored: _ANY,
    a_failed_collective_is_not_repaired: _ANY,
    an_unkillable_worker_is_awaited: ("wedge rank",),
    # These need two rare events at once: choose faults that make them likely.
    a_live_version_is_counted_without_live_state: ("suspect",),
    a_member_that_raised_counts_as_dead: ("raise", "kill rank"),
}
"""Each bug, with the kinds of faults to search."""
ABORT_PLANTS: tuple[Plant, ...] = (
    an_unwound_ranks_versions_are_assumed,
    a_re_entry_that_failed_is_tried_again,
    a_step_that_cannot_be_aborted_is_awaited,
    an_unwound_rank_counts_as_a_survivor,
    reports_of_old_epochs_are_accepted,
)
"""Bugs that show only with scripts whose steps cannot be aborted."""
NODE_PLANTS: dict[Plant, tuple[str, ...]] = {
    copies_are_kept_on_the_ranks_own_node: NODE_KINDS,
    a_lost_holder_still_counts: NODE_KINDS,
    a_remote_snapshot_counts_as_local: NODE_KINDS,
    a_version_that_another_loss_may_need_is_dropped: NODE_KINDS,
    the_job_is_protected_before_the_first_copies: ("lose node at once",),
}
"""Bugs that show only in a job on several nodes."""


def votes_are_given_despite_heartbeats_of_the_leader(patch):
    patch.setattr(quorum, "has_no_leader", lambda _agent, _now: True)


def a_leader_without_a_majority_continues(patch):
    patch.setattr(quorum, "lease_until", lambda _agent: electorate.FOREVER)


def nodes_are_given_up_before_they_stop(patch):
    patch.setattr(quorum, "SUSPEND", 1.5)


def a_new_term_raises_no_epoch(patch):
    patch.setattr(takeover, "raised", lambda epoch, _term: epoch + 1)


def a_new_term_reuses_worker_numbers(patch):
    honest = takeover._moved

    def moved(decision, event):
        before = decision.state.next_worker
        begun = honest(decision, event)
        decision.state.next_worker = before
        return begun

    patch.setattr(takeover, "_moved", moved)


def inventories_are_ignored(patch):
    honest = reconcile.compare

    def compare(decision, found, lost):
        believed = {
            node: [
                ev.WorkerFound(m.worker, m.pid or 0, -1 if m.rank is None else m.rank, decision.state.epoch, ready=True)
                for m in decision.state.on_node(node)
            ]
            for node in found
        }
        return honest(decision, believed, lost)

    patch.setattr(reconcile, "compare", compare)


def replacements_wait_for_the_store_of_a_lost_leader(patch):
    patch.setattr(reconcile, "_end_unrehearsed", lambda _decision, _truth: None)


def inventories_of_vaults_are_ignored(patch):
    patch.setattr(buddies, "inherit", lambda _decision, _holds: None)


def agents_obey_the_old_leader_too(patch):
    patch.setattr(node_side, "obeys", lambda _mine, _theirs: True)


def the_new_leader_uses_its_own_clock(patch):
    patch.setattr(agents, "rebased", lambda own_now, _last_now, _heard_at: own_now)


ELECTION_PLANTS: tuple[Plant, ...] = (
    votes_are_given_despite_heartbeats_of_the_leader,
    a_leader_without_a_majority_continues,
)
"""Bugs that show in elections, without a job."""
LEADER_PLANTS: dict[Plant, tuple[str, ...]] = {
    a_new_term_raises_no_epoch: OUTAGES,
    a_new_term_reuses_worker_numbers: OUTAGES,
    inventories_are_ignored: OUTAGES,
    inventories_of_vaults_are_ignored: OUTAGES,
    replacements_wait_for_the_store_of_a_lost_leader: ("repair, kill leader",),
    agents_obey_the_old_leader_too: ("cut pair leader", "repair, power leader"),
    the_new_leader_uses_its_own_clock: OUTAGES,
    nodes_are_given_up_before_they_stop: ("cut any", "cut leader", "cut deaf", "cut mute"),
}
"""Bugs that show only when the coordinator moves, with the kinds of outages to search."""
