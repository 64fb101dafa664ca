"""The status object: the coordinator's summary with what the agents know; `docs/status-schema.md` lists its fields. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from deadpool_run.core.state import State
from deadpool_run.ids import NodeId
from deadpool_run.vault.status_page import DeviceLibrary, Phase, RankEntry, StatusPage
from deadpool_run.view import capture_limit, job_status
from deadpool_run.wire.peers import Traffic

SCHEMA_VERSION = 1
_NS_PER_MS = 1e6
_MS_PER_S = 1e3


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's last heartbeat. `at` is on the leader's clock; None for the leader's node."""

    at: float | None
    traffic: Traffic | None


@dataclass(frozen=True, slots=True)
class NodeReports:
    """The leader's knowledge of the job's nodes."""

    leader: NodeId
    term: int
    voters: tuple[NodeId, ...]
    seen: Mapping[NodeId, Seen]
    now: float
    """On the clock of `Seen.at`."""
    decided_at: float
    """Now on the coordinator's clock."""


def status_object(  # noqa: PLR0913 - each is known to another part of the agent
    state: State,
    status_page: StatusPage,
    run: Mapping[str, Any],
    durable: Mapping[str, Any] | None,
    nodes: NodeReports | None = None,
    *,
    dropped: Mapping[str, int],
    now: float,
) -> dict[str, Any]:
    """Return the status object, ready for JSON. `now` is on the coordinator's clock. `nodes` is None on one machine.

    `dropped`: lines missing on the leader's machine.
    """
    summary = job_status.summary(state)
    slowed = {member.rank: member.slowness(now) for member in state.owners() if member.slowed is not None}
    ranks = [
        {**rank, **_rank_entry(rank_entry), "slowed": slowed.get(rank["rank"], 1.0)}
        for rank, rank_entry in zip(summary["ranks"], status_page.rank_entries, strict=True)
    ]
    several = {} if nodes is None else _several(state, summary["nodes"], nodes)
    status = {
        "schema_version": SCHEMA_VERSION,
        "run": dict(run),
        **summary,
        "ranks": ranks,
        "committed": status_page.committed(),
        "total_steps": status_page.total_steps or None,
        "device_library": DeviceLibrary(status_page.device_library).name.lower()
        if status_page.device_library
        else None,
        "durable": None if durable is None else dict(durable),
        "dropped_lines": dict(dropped),
        **several,
    }
    return {**status, "capture_limit": capture_limit.limit(status)}


def _several(state: State, shown: list[dict[str, Any]], nodes: NodeReports) -> dict[str, Any]:
    exposed_s = None if state.exposed_at is None else nodes.decided_at - state.exposed_at
    return {
        "coordinator": {"node": nodes.leader, "term": nodes.term, "voters": list(nodes.voters)},
        "nodes": [{**node, **_node(state, NodeId(node["node"]), nodes)} for node in shown],
        "exposed_ms": None if exposed_s is None else exposed_s * _MS_PER_S,
    }


def _node(state: State, node: NodeId, nodes: NodeReports) -> dict[str, Any]:
    seen = nodes.seen.get(node, Seen(None, None))
    return {
        "port": state.nodes[node].place.port,
        "ranks": sorted(state.ranks_on(node)),
        "silent_ms": None if seen.at is None else (nodes.now - seen.at) * _MS_PER_S,
        "copies": None if seen.traffic is None else asdict(seen.traffic),
    }


def _rank_entry(rank_entry: RankEntry) -> dict[str, Any]:
    """Return a rank's entry on the status page."""
    return {
        "activity": Phase(rank_entry.phase).name.lower(),
        "waiting": rank_entry.issued > rank_entry.waited,
        "step": rank_entry.completed,
        "step_ms": rank_entry.step_ns / _NS_PER_MS,
        "capture_ms": rank_entry.capture_ns / _NS_PER_MS,
        "snapshots": list(rank_entry.held),
        "no_memory_bytes": max(0, -rank_entry.growing),
    }
