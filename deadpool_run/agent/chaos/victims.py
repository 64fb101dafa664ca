"""Choice of the ranks, or the spare, that an injected fault hits. Pure."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_run.errors import RequestRefusedError, UsageError
from deadpool_run.ids import NodeId, node_called
from deadpool_run.view.health import Status, ready_spares

ACTIVITIES = ("setup", "rehearsal", "step", "optimizer", "between", "aborted", "restoring", "attaching")
"""Phases of a rank that a fault may wait for."""
REPAIRED_IN = frozenset({"running", "repairing", "finishing"})
"""Phases of a job in which a lost rank is replaced in place."""
UNREPAIRED = "all ranks restart, or the job ends"
"""The consequence of a loss in another phase."""


@dataclass(frozen=True, slots=True)
class Victims:
    """The target of a fault: exactly one field is set."""

    rank: int | None = None
    drawn: bool = False
    node: str | None = None
    spare: bool = False
    agent: bool = False
    """The agent of the node fails, or of a random node that does not lead."""

    def __post_init__(self) -> None:
        given = self.words()
        if len(given) != 1:
            got = " and ".join(filter(None, (", ".join(given[:-1]), *given[-1:]))) or "none"
            raise UsageError(
                f"name exactly one of RANK, --random, --node, --spare and --agent; it got {got}\n"
                "for example `deadpool-run kill-rank 1`"
            )

    def words(self) -> list[str]:
        """Return the target as the words of a command line that name it."""
        given = {
            "RANK": self.rank is not None,
            "--random": self.drawn,
            "--node": self.node is not None,
            "--spare": self.spare,
        }
        return [word for word, is_given in given.items() if is_given]

    def description(self) -> str:
        """Return the target as text for messages."""
        if self.agent:
            return "the agent of " + ("a random node" if self.node is None else f"node {self.node}")
        if self.rank is not None:
            return f"rank {self.rank}"
        if self.node is not None:
            return f"all ranks of node {self.node}"
        return "a spare" if self.spare else "a random rank"

    def chosen(self, status: Status, draw: random.Random) -> list[Mapping[str, Any]]:
        """Return the ranks, the spare or the node that fail now. Raises `RequestRefusedError`."""
        ranks = status.get("ranks", [])
        if self.agent:
            return [self._node(status, draw)]
        if self.spare:
            spares = ready_spares(status)
            if not spares:
                raise RequestRefusedError("no spare is ready now")
            return [draw.choice(spares)]
        if self.rank is not None and self.rank >= len(ranks):
            raise RequestRefusedError(f"there is no rank {self.rank}: ranks are 0 to {len(ranks) - 1}")
        if self.rank is not None:
            return [ranks[self.rank]]
        alive = [rank for rank in ranks if rank.get("pid") is not None]
        node = None if self.node is None else _called(self.node, status)
        if not alive:
            raise RequestRefusedError("no rank has a process now\ntry again after the repair")
        found = [draw.choice(alive)] if self.drawn else [rank for rank in alive if rank.get("node") == node]
        if not found:
            names = sorted({str(rank.get("node")) for rank in alive})
            raise RequestRefusedError(
                f"no rank of node {node} has a process now: nodes with ranks are {', '.join(names)}\n"
                "name one of them, or try again after a repair"
            )
        return found

    def _node(self, status: Status, draw: random.Random) -> Mapping[str, Any]:
        """Return the node whose agent fails: the named one, or a random one that does not lead."""
        leader = (status.get("coordinator") or {}).get("node")
        nodes = status.get("nodes", [])
        if self.node is not None:
            named = _called(self.node, status)
            return next(each for each in nodes if each["node"] == named)
        found = [each for each in nodes if each["node"] != leader]
        if not found:
            raise RequestRefusedError(f"there is no node but the leader's: {', '.join(each['node'] for each in nodes)}")
        return draw.choice(found)

    def reached(self, status: Status, step: int) -> bool:
        """Return whether the rank, or any rank if none is named, has completed this many steps."""
        return max((rank.get("step") or 0 for rank in self._concerned(status)), default=0) >= step

    def seen_in(self, status: Status, activity: str) -> bool:
        """Return whether the rank is in this phase now. An empty phase always matches."""
        return not activity or any(rank.get("activity") == activity for rank in self._concerned(status))

    def _concerned(self, status: Status) -> list[Mapping[str, Any]]:
        ranks: list[Mapping[str, Any]] = list(status.get("ranks", []))
        return ranks if self.rank is None else ranks[self.rank : self.rank + 1]


def _called(name: str, status: Status) -> NodeId:
    """Return the job's node of this name."""
    names = {NodeId(node["node"]): str(node.get("name")) for node in status.get("nodes", ())}
    try:
        return node_called(name, names)
    except LookupError as error:
        raise RequestRefusedError(str(error)) from None
