"""The status object: the coordinator's summary with what the agents know; `docs/status-schema.md` lists its fields. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict

from deadpool_run.core.state import State
from deadpool_run.ids import NodeId
from deadpool_run.vault.status_page import DeviceLibrary, StatusPage
from deadpool_run.view import capture_limit, job_status
from deadpool_run.wire.peers import Traffic

SCHEMA_VERSION = 1
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
    several = {} if nodes is None else _several(state, summary["nodes"], nodes)
    status = {
        "schema_version": SCHEMA_VERSION,
        "run": dict(run),
        **summary,
        "ranks": job_status.ranks(state, status_page.words(), now),
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
