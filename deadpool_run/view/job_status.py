"""The coordinator's state for viewers, ready for JSON."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from deadpool_run.core.recovery import relocation, restart
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import NodeId
from deadpool_run.vault.status_page import Phase

INCIDENTS_SHOWN = 5
_ACTIVITIES = tuple(activity.name.lower() for activity in Phase)
_NS_PER_MS = 1e6
_MILLIS = 1e3
_NOT_KNOWN = dict.fromkeys(("cpu_cores", "memory_bytes", "gpu_percent", "gpu_memory_bytes"))


def summary(state: State) -> dict[str, Any]:
    """Return the coordinator's part of the status object, without the ranks."""
    is_unprotected = state.phase is JobPhase.SETTING_UP and state.protection_overdue
    return {
        "phase": state.phase.value,
        "epoch": state.epoch,
        "generation": state.generation,
        "restarts": state.restarts,
        "managed": state.managed,
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
        "unprotected_reason": ": ".join(restart.why_unprotected(state)) if is_unprotected else "",
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


def ranks(state: State, words: Iterable[tuple[int, ...]], now: float) -> list[dict[str, Any]]:
    """Return each rank: its worker, and what the status page says of it. There may be thousands, so that each line counts.

    `words` are those of each `RankEntry`, in its order.
    """
    phases = {phase: phase.value for phase in MemberPhase}
    if not state.managed:
        phases[MemberPhase.SETTING_UP] = "running"
    shown = []
    for rank, (seat, said) in enumerate(zip(state.seats, words, strict=True)):
        _, _, activity, completed, issued, waited, older, newer, _, _, step_ns, capture_ns, _, _, _, growing, *used = (
            said
        )
        if older > newer:
            older, newer = newer, older
        member = None if seat.owner is None else state.members[seat.owner]
        shown.append(
            {
                "rank": rank,
                "worker": seat.owner,
                "pid": None if member is None else member.pid,
                "phase": phases[member.phase] if member is not None else "done" if seat.done else "vacant",
                "node": seat.node if member is None else member.node,
                "local_rank": seat.local_rank,
                "activity": _ACTIVITIES[activity],
                "waiting": issued > waited,
                "step": completed,
                "step_ms": step_ns / _NS_PER_MS,
                "capture_ms": capture_ns / _NS_PER_MS,
                "snapshots": [older, newer] if older >= 0 else [newer] if newer >= 0 else [],
                "no_memory_bytes": -growing if growing < 0 else 0,
                **(_used(*used) if member is not None else _NOT_KNOWN),
                "slowed": 1.0 if member is None or member.slowed is None else member.slowness(now),
            }
        )
    return shown


def _used(cpu_millis: int, memory: int, gpu_percent: int, gpu_memory: int) -> dict[str, float | int | None]:
    return {
        "cpu_cores": None if cpu_millis < 0 else cpu_millis / _MILLIS,
        "memory_bytes": None if memory < 0 else memory,
        "gpu_percent": None if gpu_percent < 0 else gpu_percent,
        "gpu_memory_bytes": None if gpu_memory < 0 else gpu_memory,
    }


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
