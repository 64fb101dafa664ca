"""The choice of voters: at most five, in different failure domains as far as possible. One is replaced at a time."""

from collections import Counter
from collections.abc import Iterator

from deadpool_run.core.leadership.electorate import MAX_VOTERS, NEVER, Agent
from deadpool_run.ids import NodeId


def wanted(nodes: int) -> int:
    """Return how many of these nodes vote. An even number survives no more losses than the odd one below it."""
    return nodes if nodes <= 2 else min(MAX_VOTERS, nodes - 1 + nodes % 2)


def change(agent: Agent, now: float) -> tuple[NodeId, ...] | None:
    """Return the leader's next voters, of which one is new, gone or replaced; None if they are right.

    A new one has answered of late: it extends the leader's lease from the beginning. So has a majority of the present
    voters, which must agree: an addition that waits for one that has failed would hide from the leader that it has. One that
    is gone is replaced in the same change: if it were only left out at first, the job would meanwhile survive one loss less.
    """
    voters = agent.configuration.voters
    count = wanted(1 + len(agent.answered_at))
    gone = next((voter for voter in voters if voter != agent.me and voter not in agent.answered_at), None)
    staying = _without(voters, gone)
    share = Counter(domain for voter in staying if (domain := _domain(agent, voter)))  # an unknown one is not shared
    if len(staying) < count and (new := _newcomer(agent, now, share)) is not None:
        return (*staying, new)
    if gone is not None:
        return staying
    if len(voters) > count:
        return _without(voters, max(voters, key=lambda voter: (voter != agent.me, share[_domain(agent, voter)])))
    crowded = any(number > 1 for number in share.values())
    fresh = next(_fresh(agent, _others(agent, now), share), None) if crowded else None
    return None if fresh is None else (*voters, fresh)


def _newcomer(agent: Agent, now: float, share: Counter[str]) -> NodeId | None:
    """Return the first node that may become a voter: one of another failure domain than the voters, if there is one."""
    fresh = next(_fresh(agent, _others(agent, now), share), None)
    return next(_others(agent, now), None) if fresh is None else fresh


def _others(agent: Agent, now: float) -> Iterator[NodeId]:
    """Yield the nodes that may become voters. There are thousands: the caller looks at no more than it needs."""
    voters, recent = agent.configuration.voters, now - agent.timeout_s / 2
    answering = sum(voter == agent.me or agent.answers.get(voter, NEVER) > recent for voter in voters)
    if 2 * answering > len(voters):
        for node in (agent.me, *agent.answered_at):
            if node not in voters and agent.answers.get(node, NEVER) > recent:
                yield node


def _fresh(agent: Agent, nodes: Iterator[NodeId], share: Counter[str]) -> Iterator[NodeId]:
    return (node for node in nodes if not (domain := _domain(agent, node)) or domain not in share)


def _domain(agent: Agent, node: NodeId) -> str:
    return agent.failure_domains.get(node, "")


def _without(voters: tuple[NodeId, ...], one: NodeId | None) -> tuple[NodeId, ...]:
    return tuple(voter for voter in voters if voter != one)
