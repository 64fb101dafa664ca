"""Leader takeover: collect every node's inventory, reconcile it with the log, then start one new epoch.

The log may lack the last coordinator's last orders, so the workers that each agent finds are the truth. Until every node
has sent its inventory, or is lost, nothing is decided, and other events wait.
"""

from itertools import chain

from msgspec import structs

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import buddies
from deadpool_run.core.decision import Decision
from deadpool_run.core.found import Discards
from deadpool_run.core.leadership import reconcile
from deadpool_run.core.recovery.losses import device_failed, remove_nodes
from deadpool_run.core.state import Move
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import Epoch, NodeId, WorkerId

TERM_BITS = 20
"""A term has room for 2^20 epochs and workers, so that two coordinators never use the same number."""


def events_to_handle(decision: Decision, event: ev.Event) -> tuple[ev.Event, ...]:
    """Return the events to handle now: none during a takeover, and all that waited at its end."""
    if isinstance(event, ev.CoordinatorMoved):
        if not _moved(decision, event):
            return ()
    elif decision.state.move is None:
        return (event,)
    else:
        for fact in _facts(event):  # each is known, or waits
            _note(decision, decision.state.move, fact)
    move = decision.state.move
    if move is None or (move.waiting and not _is_overdue(decision, move, event)):
        return ()
    _finish(decision, move)
    return (*move.deferred, ev.TimeAdvanced())


def _facts(event: ev.Event) -> tuple[ev.Event, ...]:
    match event:
        case ev.NodesLost(losses):
            return losses
        case ev.RanksReported(reports):
            return reports
        case _:
            return (event,)


def _is_overdue(decision: Decision, move: Move, event: ev.Event) -> bool:
    """Tell whether time is up. Only the clock says so: the inventory of the last node may be the next event."""
    return isinstance(event, ev.TimeAdvanced) and decision.now >= move.began_at + decision.settings.node_timeout_s


def resynced_late(decision: Decision, event: ev.NodeResynced) -> None:
    """End workers of an earlier term on a node whose inventory comes late."""
    for failed in _failed_devices(event):
        device_failed(decision, failed)
    if event.node in decision.state.nodes:
        for found in event.workers:
            if (
                found.alive
                and found.worker not in decision.state.members
                and found.worker < decision.state.term << TERM_BITS
            ):
                reconcile.end_orphan(decision, reconcile.RankClaim(event.node, found))


def _failed_devices(event: ev.NodeResynced) -> list[ev.DeviceFailed]:
    return [ev.DeviceFailed(event.node, *each) for each in event.failed_devices]


def _moved(decision: Decision, event: ev.CoordinatorMoved) -> bool:
    """Begin the term. False if there is nothing to wait for."""
    state = decision.state
    if event.term <= state.term:
        return False
    state.term = event.term
    if state.phase is JobPhase.STOPPED:
        assert state.stop is not None
        decision.effects.append(do.StopJob(state.stop.exit_code, state.stop.reason))  # it may not have been performed
        return False
    deferred = [] if state.move is None else state.move.deferred
    state.epoch = raised(state.epoch, event.term)
    state.next_worker = WorkerId(max(state.next_worker, event.term << TERM_BITS))
    state.suspicion = None
    state.buddies_ordered = False
    state.released = frozenset()  # the order may not have been performed
    state.move = Move(decision.now, event.node, waiting=set(state.nodes), deferred=deferred)
    decision.announce(
        f"the coordinator is on node {_name(decision, event.node)} now", f"it moved, in term {event.term}"
    )
    return True


def raised(epoch: Epoch, term: int) -> Epoch:
    """Return an epoch that no earlier coordinator can have used."""
    return Epoch(max(epoch, term << TERM_BITS) + 1)


def _name(decision: Decision, node: NodeId) -> str:
    return decision.state.nodes[node].place.name if node in decision.state.nodes else node


def _note(decision: Decision, move: Move, event: ev.Event) -> None:
    """Take in an inventory or a loss, and defer any other event."""
    match event:
        case ev.NodeResynced() if event.node in move.waiting:
            move.found[event.node] = event.workers
            move.holds[event.node] = event.holds
            told = event.discarded, event.earlier
            move.discarded, move.earlier = max((move.discarded, move.earlier), told)
            move.discarded_in.append(event.discarded[0])
            move.waiting.remove(event.node)
            move.deferred += _failed_devices(event)
        case ev.NodeLost() if event.node in decision.state.nodes:
            move.lost = {event.node: event.reason, **move.lost}
            move.waiting.discard(event.node)
        case ev.TimeAdvanced():
            pass
        case _:
            move.deferred.append(event)


def _missed(move: Move) -> Discards:
    """Return the orders to discard that some node may not have had, and the last one."""
    return *(each for each in move.earlier if each[0] > min(move.discarded_in)), move.discarded


def _finish(decision: Decision, move: Move) -> None:
    """Reconcile the members with the inventories, and resume the job."""
    decision.state.move = None
    silent = f"it did not answer the new coordinator within {decision.settings.node_timeout_s:g} s"
    lost = {**dict.fromkeys(sorted(move.waiting), silent), **move.lost}
    members = list(chain.from_iterable(remove_nodes(decision, lost).values()))
    ended = {event.worker: event for event in move.deferred if isinstance(event, ev.WorkerExited)}
    found = {
        node: tuple(
            structs.replace(each, code=ended[each.worker].code, signal=ended[each.worker].signal)
            if each.worker in ended  # it has ended since it was found, while others were waited for
            else each
            for each in workers
        )
        for node, workers in move.found.items()
        if node not in lost
    }
    why = f"the coordinator moved to node {_name(decision, move.to)}"
    truth = reconcile.compare(decision, found, members)
    buddies.inherit(decision, move.holds)
    reconcile.go_on(decision, truth, _missed(move), why)
    for member in decision.state.in_phase(MemberPhase.STARTING):
        decision.set_member(member.worker, since=decision.now)
