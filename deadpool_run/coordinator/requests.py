"""Answers to viewers' requests, from whichever node they come. No I/O.

`coordinator.control` lists requests and answers.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from deadpool_run.coordinator.shared_status import SharedStatus
from deadpool_run.core.events import (
    AgentKillRequested,
    DrainRequested,
    Event,
    KillRequested,
    SlowRequested,
    StopRequested,
)
from deadpool_run.core.injection import HANGS, SLOWNESS_LIMITS, KillHow, Slowness, is_possible
from deadpool_run.core.recovery import relocation
from deadpool_run.core.state import State
from deadpool_run.errors import RequestRefusedError
from deadpool_run.ids import NodeId, Rank, WorkerId, node_called
from deadpool_run.wire.typed import to_json


class StatusSource(Protocol):
    """The leader, as the request handler needs it."""

    @property
    def state(self) -> State:
        """The job's state, to read only."""

    def status(self) -> Mapping[str, Any]:
        """Return the status object."""

    def holder(self, rank: Rank) -> tuple[WorkerId, int] | None:
        """Return the worker and the pid that hold the rank; None if no worker does now."""

    def submit(self, event: Event) -> None:
        """Submit a user's request as an event."""


def is_error(answer: bytes) -> bool:
    """Return whether an encoded answer is that a request cannot be carried out."""
    return answer.startswith(b'{"error":')


def with_node_here(request: Mapping[str, Any], here: NodeId) -> Mapping[str, Any]:
    """Return the request as the leader needs it: `here` means the node of the agent that was asked."""
    return {**request, "node": here} if request.get("here") else request


class RequestHandler:
    """Answers requests next to the coordinator."""

    def __init__(self, world_size: int, source: StatusSource, *, finds_hangs: bool = True) -> None:
        """Begin, in the loop in which requests come. `finds_hangs`: the job looks for hung ranks."""
        self.world_size, self._finds_hangs = world_size, finds_hangs
        self.source = source
        self._status = SharedStatus(source.status)

    def close(self) -> None:
        """Answer those who wait for a status."""
        self._status.close()

    def answer_later(self, request: Mapping[str, Any], then: Callable[[bytes], None]) -> None:
        """Pass the answer to `then`, as a JSON object on one line: the status when it is made next, others at once."""
        if request.get("do") == "status":
            self._status.request(then)
        else:
            then(to_json(self.answer(request)))

    async def encoded(self, request: Mapping[str, Any]) -> bytes:
        """Return the answer as a JSON object on one line."""
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.answer_later(request, lambda answer: None if answered.done() else answered.set_result(answer))
        return await answered

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: PLR0911 - one for each request
        """Return the answer to a request, or the reason why there is none."""
        try:
            match request:
                case {"do": "status"}:
                    return self.source.status()
                case {"do": "kill-rank", "rank": int(rank)}:
                    how, force = request.get("how", KillHow.SIGKILL), bool(request.get("force"))
                    return self._kill(rank, how, force=force)
                case {"do": "kill-spare", "worker": int(worker)}:
                    return self._kill_spare(worker, request.get("how", KillHow.SIGKILL))
                case {
                    "do": "slow-rank",
                    "rank": int(rank),
                    "factor": int() | float() as factor,
                    "for_s": int() | float() as s,
                }:
                    return self._slow(rank, Slowness(float(factor), float(s)))
                case {"do": "kill-agent"}:
                    return self._kill_agent(self._node(request.get("node")), force=bool(request.get("force")))
                case {"do": "drain", "rank": int(rank)}:
                    return self._drain(Rank(rank), None)
                case {"do": "drain", "node": str(name)}:
                    return self._drain(None, self._node(name))
                case {"do": "stop"}:
                    self.source.submit(StopRequested(0))
                    return {"ok": True}
        except RequestRefusedError as refusal:
            return {"error": str(refusal)}
        return {"error": f"unknown request: {json.dumps(request)[:200]}"}

    def _kill_spare(self, worker: int, how: Any) -> Mapping[str, Any]:
        _refuse_unknown(how)
        self.source.submit(KillRequested(Rank(-1), KillHow(how), WorkerId(worker)))
        return {"ok": True, "worker": worker, "how": str(how)}

    def _kill_agent(self, node: NodeId, *, force: bool) -> Mapping[str, Any]:
        state = self.source.state
        if len(state.nodes) == 1 and not force:
            raise RequestRefusedError(
                f"node {state.nodes[node].place.name} is the only one: the job would end with its agent\n"
                "kill a rank instead, or add --yes to end the job"
            )
        self.source.submit(AgentKillRequested(node))
        return {"ok": True, "node": node, "ranks": sorted(state.ranks_on(node))}

    def _node(self, name: Any) -> NodeId:
        """Return the node of this name; the only one if the name is None."""
        names = {node.node: node.place.name for node in self.source.state.nodes.values()}
        if name is None and len(names) > 1:
            raise RequestRefusedError(f"name the node: nodes are {', '.join(sorted(names))}")
        try:
            return next(iter(names)) if name is None else node_called(str(name), names)
        except LookupError as error:
            raise RequestRefusedError(str(error)) from None

    def _drain(self, rank: Rank | None, node: NodeId | None) -> Mapping[str, Any]:
        state = self.source.state
        if why := relocation.refusal(state, rank, node):
            raise RequestRefusedError(why)
        self.source.submit(DrainRequested(rank, node))
        ranks = sorted(state.ranks_on(node)) if node is not None else [rank]
        return {"ok": True, "ranks": ranks, "node": node}

    def _kill(self, number: int, how: Any, *, force: bool) -> Mapping[str, Any]:
        _refuse_unknown(how)
        if how in HANGS and not self._finds_hangs and not force:
            raise RequestRefusedError(
                f"{how}: the process would live, and with --hang-timeout 0 the job looks for no hangs\n"
                "choose another --how, or add --yes"
            )
        worker, pid = self._holder(number)
        self.source.submit(KillRequested(Rank(number), KillHow(how)))
        is_found = how not in HANGS or self._finds_hangs
        return {"ok": True, "rank": number, "worker": worker, "pid": pid, "how": str(how), "is_found": is_found}

    def _slow(self, number: int, slowness: Slowness) -> Mapping[str, Any]:
        if not is_possible(slowness):
            raise RequestRefusedError(f"{slowness}: {SLOWNESS_LIMITS}")
        worker, pid = self._holder(number)
        self.source.submit(SlowRequested(Rank(number), slowness.factor, slowness.for_s))
        return {"ok": True, "rank": number, "worker": worker, "pid": pid, "how": str(slowness)}

    def _holder(self, number: int) -> tuple[WorkerId, int]:
        if not 0 <= number < self.world_size:
            raise RequestRefusedError(f"there is no rank {number}: ranks are 0 to {self.world_size - 1}")
        holder = self.source.holder(Rank(number))
        if holder is None:
            raise RequestRefusedError(f"no worker holds rank {number} now: try again after the repair")
        return holder


def _refuse_unknown(how: Any) -> None:
    if how not in list(KillHow):
        raise RequestRefusedError(f"how must be one of {', '.join(KillHow)}, not {how!r}")
