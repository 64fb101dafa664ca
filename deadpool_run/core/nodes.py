"""Which nodes there are: they join at the start and later, and their loss is the loss of all that is on them."""

from collections.abc import Collection
from typing import assert_never

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.changes import changed
from deadpool_run.core.copies import buddies, holders
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import Member, Node, State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.core.turn import Turn
from deadpool_run.ids import NodeId

NodeNews = ev.NodeJoined | ev.SnapshotCommitted | ev.ReplicasReported
_COPIED_IN = frozenset({JobPhase.UNPROTECTED, JobPhase.RUNNING})


def hear(turn: Turn, event: NodeNews) -> None:
    """Take in what agents say of their nodes."""
    match event:
        case ev.NodeJoined():
            joined(turn, event.node, event.place)
        case ev.SnapshotCommitted():
            if event.epoch == turn.state.epoch:
                turn.set(committed=True)
                _covered(turn)
                if turn.state.former_buddies and turn.state.phase in _COPIED_IN:
                    turn.set(former_buddies=())  # all that they hold is where it belongs now
        case ev.ReplicasReported():
            holders.reported(turn, event)
        case _:
            assert_never(event)


def joined(turn: Turn, node: NodeId, place: ev.Place) -> None:
    """Take a node in; the pool gives it workers."""
    state = turn.state
    if node in state.leaves:
        return  # one life of an agent joins once
    turn.set(
        nodes={**state.nodes, node: Node(node, place, state.arrivals)},
        leaves={**state.leaves, node: place.leaf},
        arrivals=state.arrivals + 1,
        joined_at=turn.now,
    )


def is_exposed(settings: Settings, state: State) -> bool:
    """Tell whether ranks may lack copies that there are to be, so that it is worth to tell when they have them."""
    if state.exposed_at is None or state.phase not in _COPIED_IN:
        return False
    return bool(state.buddies) and all(len(holders) >= settings.replicas for holders in state.buddies)


def _covered(turn: Turn) -> None:
    """End the exposure that a loss of a node began, and note it with the repair of that loss."""
    state = turn.state
    if not is_exposed(turn.settings, state) or state.exposed_at is None:
        return
    exposed_s = turn.now - state.exposed_at
    turn.set(exposed_at=None)
    turn.effects.append(do.Announce(f"every rank has all its copies again, {exposed_s:.2f} s after the loss", ""))
    last = state.incidents[-1] if state.incidents else None
    if state.repair is not None:
        turn.set_repair(exposed_s=exposed_s)
    elif last is not None and last.epoch == state.epoch and last.exposed_s is None:
        turn.set(incidents=(*state.incidents[:-1], changed(last, exposed_s=exposed_s)))


def remove(turn: Turn, lost: Collection[NodeId]) -> dict[NodeId, list[Member]]:
    """Forget lost nodes with all their workers, and return these as they were.

    What they held for others is not forgotten here.
    """
    if not lost:
        return {}
    if turn.state.exposed_at is None and _had_copies(turn.state, lost):
        turn.set(exposed_at=turn.now)
    fallen = {node: turn.state.on_node(node) for node in lost}
    turn.set(
        nodes={node: kept for node, kept in turn.state.nodes.items() if node not in fallen},
        joined_at=turn.now,
    )
    for members in fallen.values():
        for member in members:
            turn.remove(member)
    return fallen


def _had_copies(state: State, lost: Collection[NodeId]) -> bool:
    """Tell whether one copy of any rank's snapshots, or their original, was on one of these."""
    if not state.buddies:
        return False
    gone = frozenset(lost)
    return any(node in state.seat_tally.homes for node in gone) or any(
        not gone.isdisjoint(each) for each in state.buddies
    )


def set_buddies(turn: Turn) -> None:
    """Have copies sent to those who are to hold them now. In a repair, those of before it are still needed."""
    state = turn.state
    if state.phase not in _COPIED_IN or _are_as_they_were(turn):
        return
    chosen = buddies.choose(turn.settings, state)
    if chosen != state.buddies:
        turn.set(buddies=chosen, former_buddies=state.buddies, buddies_told=False)
    if not turn.state.buddies_told:
        turn.set(buddies_told=True)
        turn.effects.append(do.SetBuddies(chosen))


def _are_as_they_were(turn: Turn) -> bool:
    """Tell whether nothing has changed since buddies were chosen, at the end of the last decision, that they depend on."""
    before, state = turn.before, turn.state
    return (
        before.phase in _COPIED_IN
        and state.buddies_told
        and state.nodes is before.nodes
        and state.buddies is before.buddies
        and state.seat_tally.homes is before.seat_tally.homes
        and (state.seat_tally.unsealed > 0 or before.seat_tally.unsealed == 0)  # only now all say whom they are like
    )
