"""Which nodes there are: they join at the start and later, and their loss is the loss of all that is on them."""

from typing import assert_never

from deadpool_run.core import buddies, holders
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.lifecycle import JobPhase
from deadpool_run.core.membership import Member, Node
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


def remove(turn: Turn, node: NodeId) -> list[Member]:
    """Forget a lost node with all its workers, and return these as they were.

    What it held for others is not forgotten here.
    """
    members = turn.state.on_node(node)
    turn.set(nodes={other: kept for other, kept in turn.state.nodes.items() if other != node}, joined_at=turn.now)
    for member in members:
        turn.remove(member)
    return members


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
    )
