"""Bugs that the simulator must find: each replaces one small function of the core for the time of a test.

A simulator that does not find them has gone blind; none of them is reachable by a setting of the product.
"""

from collections.abc import Callable
from dataclasses import replace

import agents
import node_side
import pytest
from outages import KINDS as OUTAGES
from simulations import KINDS, NODE_KINDS, REFUSAL_KINDS

from deadpool_run.core import coordinator, reports, timers
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import buddies, holders
from deadpool_run.core.decision import Decision
from deadpool_run.core.leadership import electorate, quorum, reconcile, takeover
from deadpool_run.core.recovery import repair, restart, spare_pool
from deadpool_run.core.state import State
from deadpool_run.core.transitions import MEMBER_TRANSITIONS, MemberPhase

Plant = Callable[[pytest.MonkeyPatch], None]


def stale_words_are_obeyed(patch):
    patch.setattr(reports, "is_current", lambda _state, _epoch: True)


def acks_are_kept_over_epochs(patch):
    honest = repair.recall

    def recall(decision, member):
        held, phase = decision.state.seats[member.rank].held, member.phase
        honest(decision, member)
        if phase in (MemberPhase.DRAINED, MemberPhase.REHEARSED):
            decision.set_member(member.worker, phase=phase)
            decision.set_seat(member.rank, held=held)

    patch.setattr(repair, "recall", recall)


def the_epoch_is_not_bumped(patch):
    honest = Decision.next_epoch
    patch.setattr(
        Decision, "next_epoch", lambda decision: decision.state.epoch if decision.state.repair else honest(decision)
    )


def the_resume_is_chosen_from_the_union(patch):
    patch.setattr(holders, "newest_common", lambda held: max(frozenset.union(*held), default=None))


def the_oldest_version_is_chosen_although_survivors_dropped_it(patch):
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


def the_pool_never_heals(patch):
    honest = spare_pool.heal

    def heal(decision):
        if decision.state.next_worker == 0:
            honest(decision)

    patch.setattr(spare_pool, "heal", heal)


def a_dead_ranks_slots_are_ignored(patch):
    patch.setattr(holders, "held_after_death", lambda _exited: frozenset())


def a_survivors_live_version_counts_although_it_has_none(patch):
    patch.setattr(holders, "held_by_survivor", lambda drained: frozenset({*drained.captured, drained.completed}))


def all_attach_before_all_are_restored(patch):
    def attach(decision):
        for member in decision.state.in_phase(MemberPhase.RESTORED):
            decision.order(do.AttachGroups(member.worker, decision.state.epoch))

    patch.setattr(repair, "_attach", attach)


def an_unkillable_worker_is_waited_for(patch):
    limit = timers.LIMITS[MemberPhase.ENDING]
    patch.setitem(
        timers.LIMITS,
        MemberPhase.ENDING,
        replace(limit, expired=lambda decision, one: decision.kill(one.worker, "again")),
    )


def a_suspicion_is_forgotten(patch):
    patch.setattr(repair, "retry", lambda _decision, _reason: None)


def a_member_that_raised_is_taken_for_dead(patch):
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


def a_lost_holder_is_still_counted_on(patch):
    patch.setattr(holders, "forget", lambda _decision, _rank, _node: False)


def what_is_far_is_taken_for_near(patch):
    patch.setattr(holders, "nearest", lambda _seat, _member, _version: None)


def nobody_waits_for_the_first_copies(patch):
    honest = restart.advance_unprotected

    def advance_unprotected(decision):
        decision.state.committed = True
        honest(decision)

    patch.setattr(restart, "advance_unprotected", advance_unprotected)


def what_an_unwound_rank_holds_is_not_asked(patch):
    honest = coordinator.HANDLERS[ev.RunUnwound]

    def unwound(decision, event):
        versions = tuple(range(event.completed + 1))
        honest(decision, ev.RunUnwound(event.worker, event.completed, versions))

    patch.setitem(coordinator.HANDLERS, ev.RunUnwound, unwound)


def a_re_entry_that_failed_is_tried_again(patch):
    patch.setattr(repair, "can_reenter", lambda member: member.phase is MemberPhase.DRAINING)
    honest = Decision.order

    def order(decision, given, **changes):
        honest(decision, given, **changes)
        if isinstance(given, do.AbortStep) and decision.state.members[given.worker].reentered:
            decision.set_member(given.worker, phase=MemberPhase.DRAINING)

    patch.setattr(Decision, "order", order)


def who_cannot_be_drained_is_waited_for(patch):
    patient = replace(
        timers.LIMITS[MemberPhase.DRAINING],
        expired=lambda decision, member: decision.set_member(member.worker, since=decision.now),
    )
    patch.setitem(timers.LIMITS, MemberPhase.DRAINING, patient)


def an_unwound_rank_counts_as_a_survivor(patch):
    patch.setitem(coordinator.HANDLERS, ev.RunUnwound, reports.accepted(repair.unwound))


_ANY = KINDS
PLANTS: dict[Plant, tuple[str, ...]] = {
    a_refusal_is_repaired_like_an_exception: REFUSAL_KINDS,
    acks_are_kept_over_epochs: _ANY,
    the_epoch_is_not_bumped: _ANY,
    the_resume_is_chosen_from_the_union: _ANY,
    the_oldest_version_is_chosen_although_survivors_dropped_it: _ANY,
    an_unready_spare_is_promoted: _ANY,
    the_pool_never_heals: _ANY,
    a_dead_ranks_slots_are_ignored: _ANY,
    all_attach_before_all_are_restored: _ANY,
    a_suspicion_is_forgotten: _ANY,
    an_unkillable_worker_is_waited_for: ("wedge rank",),
    # These need two rare things at once: look where they are likely.
    a_survivors_live_version_counts_although_it_has_none: ("suspect",),
    a_member_that_raised_is_taken_for_dead: ("raise", "kill rank"),
}
"""Each bug, with the kinds of faults for the search."""
DRAIN_PLANTS: tuple[Plant, ...] = (
    what_an_unwound_rank_holds_is_not_asked,
    a_re_entry_that_failed_is_tried_again,
    who_cannot_be_drained_is_waited_for,
    an_unwound_rank_counts_as_a_survivor,
    stale_words_are_obeyed,
)
"""Bugs that show only with scripts that cannot be drained."""
NODE_PLANTS: dict[Plant, tuple[str, ...]] = {
    copies_are_kept_on_the_ranks_own_node: NODE_KINDS,
    a_lost_holder_is_still_counted_on: NODE_KINDS,
    what_is_far_is_taken_for_near: NODE_KINDS,
    nobody_waits_for_the_first_copies: ("lose node at once",),
}
"""Bugs that show only in a job on several nodes."""


def votes_are_given_while_the_leader_is_heard(patch):
    patch.setattr(quorum, "has_no_leader", lambda _agent, _now: True)


def a_leader_without_a_majority_goes_on(patch):
    patch.setattr(quorum, "authority_until", lambda _agent: electorate.FOREVER)


def nodes_are_given_up_before_they_stop(patch):
    patch.setattr(quorum, "SUSPEND", 1.5)


def a_new_term_raises_no_epoch(patch):
    patch.setattr(takeover, "raised", lambda epoch, _term: epoch + 1)


def a_new_term_raises_no_workers_number(patch):
    honest = takeover._moved

    def moved(decision, event):
        before = decision.state.next_worker
        begun = honest(decision, event)
        decision.state.next_worker = before
        return begun

    patch.setattr(takeover, "_moved", moved)


def what_agents_find_is_ignored(patch):
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


def replacements_wait_for_the_store_of_a_leader_that_is_gone(patch):
    patch.setattr(reconcile, "_end_unrehearsed", lambda _decision, _truth: None)


def what_vaults_hold_is_not_asked(patch):
    patch.setattr(buddies, "inherit", lambda _decision, _holds: None)


def agents_obey_the_old_leader_too(patch):
    patch.setattr(node_side, "obeys", lambda _mine, _theirs: True)


def the_new_leader_reads_its_own_clock(patch):
    patch.setattr(agents, "rebased", lambda own_now, _last_now, _heard_at: own_now)


ELECTION_PLANTS: tuple[Plant, ...] = (
    votes_are_given_while_the_leader_is_heard,
    a_leader_without_a_majority_goes_on,
)
"""Bugs that show without a job."""
LEADER_PLANTS: dict[Plant, tuple[str, ...]] = {
    a_new_term_raises_no_epoch: OUTAGES,
    a_new_term_raises_no_workers_number: OUTAGES,
    what_agents_find_is_ignored: OUTAGES,
    what_vaults_hold_is_not_asked: OUTAGES,
    replacements_wait_for_the_store_of_a_leader_that_is_gone: ("repair, kill leader",),
    agents_obey_the_old_leader_too: ("cut pair leader", "repair, power leader"),
    the_new_leader_reads_its_own_clock: OUTAGES,
    nodes_are_given_up_before_they_stop: ("cut any", "cut leader", "cut deaf", "cut mute"),
}
"""Bugs that show only when the coordinator moves, with the kinds of outages for the search."""
