"""Which nodes there are: they join at the start and later, and their loss is the loss of all that is on them."""

from collections.abc import Collection
from typing import assert_never

from msgspec.structs import replace

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import buddies, holders
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId

NodeNews = ev.NodeJoined | ev.SnapshotCommitted | ev.ReplicasReported
_COPIED_IN = frozenset({JobPhase.UNPROTECTED, JobPhase.RUNNING})


def hear(decision: Decision, event: NodeNews) -> None:
    """Take in what agents say of their nodes."""
    match event:
        case ev.NodeJoined():
            decision.add_node(event.node, event.place)
        case ev.SnapshotCommitted():
            if event.epoch == decision.state.epoch:
                decision.state.committed = True
                _covered(decision)
                if decision.state.former_buddies and decision.state.phase in _COPIED_IN:
                    decision.state.former_buddies = ()  # all that they hold is where it belongs now
        case ev.ReplicasReported():
            holders.reported(decision, event)
        case _:
            assert_never(event)


def is_exposed(settings: Settings, state: State) -> bool:
    """Tell whether ranks may lack copies that there are to be, so that it is worth to tell when they have them."""
    if state.exposed_at is None or state.phase not in _COPIED_IN:
        return False
    return bool(state.buddies) and all(len(holders) >= settings.replicas for holders in state.buddies)


def _covered(decision: Decision) -> None:
    """End the exposure that a loss of a node began, and note it with the repair of that loss."""
    state = decision.state
    if not is_exposed(decision.settings, state) or state.exposed_at is None:
        return
    exposed_s = decision.now - state.exposed_at
    state.exposed_at = None
    decision.effects.append(do.Announce(f"every rank has all its copies again, {exposed_s:.2f} s after the loss", ""))
    last = state.incidents[-1] if state.incidents else None
    if state.repair is not None:
        state.repair.exposed_s = exposed_s
    elif last is not None and last.epoch == state.epoch and last.exposed_s is None:
        state.incidents = (*state.incidents[:-1], replace(last, exposed_s=exposed_s))


def remove(decision: Decision, lost: Collection[NodeId]) -> dict[NodeId, list[Member]]:
    """Forget lost nodes with all their workers, and return these as they were.

    What they held for others is not forgotten here.
    """
    if not lost:
        return {}
    state = decision.state
    if state.exposed_at is None and _had_copies(state, lost):
        state.exposed_at = decision.now
    fallen = {node: state.on_node(node) for node in lost}
    state.nodes = {node: kept for node, kept in state.nodes.items() if node not in fallen}
    state.joined_at = decision.now
    decision.changes.nodes_lost = True
    for members in fallen.values():
        for member in members:
            decision.remove(member)
    return fallen


def _had_copies(state: State, lost: Collection[NodeId]) -> bool:
    """Tell whether one copy of any rank's snapshots, or their original, was on one of these."""
    if not state.buddies:
        return False
    gone = frozenset(lost)
    return any(state.ranks_on(node) for node in gone) or any(not gone.isdisjoint(each) for each in state.buddies)


def set_buddies(decision: Decision) -> None:
    """Have copies sent to those who are to hold them now. In a repair, those of before it are still needed."""
    state = decision.state
    if state.phase not in _COPIED_IN or _are_as_they_were(decision):
        return
    chosen = buddies.choose(decision.settings, state)
    if chosen != state.buddies:
        state.former_buddies, state.buddies, state.buddies_told = state.buddies, chosen, False
    if not state.buddies_told:
        state.buddies_told = True
        decision.effects.append(do.SetBuddies(chosen))


def _are_as_they_were(decision: Decision) -> bool:
    """Tell whether nothing has changed since buddies were chosen, at the end of the last decision, that they depend on."""
    changes, state = decision.changes, decision.state
    sealed_now = (
        not decision.all_sealed_before and not state.seat_counters.unsealed
    )  # only now all say whom they are like
    return (
        decision.phase_before in _COPIED_IN
        and state.buddies_told
        and not (changes.joined or changes.nodes_lost or changes.placement or sealed_now)
    )
