"""The coordinator's state for viewers, ready for JSON."""

from collections.abc import Iterator
from typing import Any

import msgspec

from deadpool_run.core.recovery import relocation, restart
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import NodeId

INCIDENTS_SHOWN = 5


def summary(state: State) -> dict[str, Any]:
    """Return the coordinator's part of the status object."""
    is_unprotected = state.phase is JobPhase.UNPROTECTED and state.unprotected
    return {
        "phase": state.phase.value,
        "epoch": state.epoch,
        "generation": state.generation,
        "restarts": state.restarts,
        "managed": state.managed,
        "ranks": [_rank(state, rank) for rank in range(len(state.seats))],
        "spares": [
            {
                "worker": worker,
                "pid": member.pid,
                "phase": member.phase.value,
                "node": member.node,
                "prepared": member.prepared,
            }
            for worker, member in sorted(state.members.items())
            if member.rank is None
        ],
        "nodes": list(_nodes(state)),
        "capture_interval": state.capture_interval,
        "resume": None if state.repair is None or state.phase is not JobPhase.REPAIRING else state.repair.resume,
        "unprotected": ": ".join(restart.describe_unprotected(state)) if is_unprotected else "",
        "incidents": msgspec.to_builtins(state.incidents[-INCIDENTS_SHOWN:]),
        "draining": _draining(state),
        "reason": state.reason,
    }


def _draining(state: State) -> dict[str, Any] | None:
    if state.relocation is None:
        return None
    under_way = state.relocation
    ranks = [member.rank for member in relocation.moving(state, under_way) if member.rank is not None]
    return {"ranks": ranks, "node": under_way.node, "at": under_way.limit if under_way.is_set else None}


def _rank(state: State, rank: int) -> dict[str, Any]:
    seat = state.seats[rank]
    if seat.owner is None:
        holder: dict[str, Any] = {
            "worker": None,
            "pid": None,
            "phase": "done" if seat.done else "vacant",
            "node": seat.node,
        }
    else:
        member = state.members[seat.owner]
        unmanaged = member.phase is MemberPhase.SETTING_UP and not state.managed
        phase = "running" if unmanaged else member.phase.value
        holder = {"worker": member.worker, "pid": member.pid, "phase": phase, "node": member.node}
    return {"rank": rank, **holder, "local_rank": seat.local_rank}


def _nodes(state: State) -> Iterator[dict[str, Any]]:
    copies_of: dict[NodeId, list[int]] = {node: [] for node in state.nodes}
    for rank, buddies in enumerate(state.buddies):
        for buddy in buddies:
            if buddy in copies_of:
                copies_of[buddy].append(rank)
    for node in state.nodes.values():
        yield {
            "node": node.node,
            "name": node.place.name,
            "address": node.place.address,
            "failure_domain": node.place.failure_domain,
            "copies_of": copies_of[node.node],
            "drained": node.node in state.closed,
        }
