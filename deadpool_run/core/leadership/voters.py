"""The choice of voters: at most five, in different failure domains as far as possible. One changes at a time."""

from collections import Counter

from deadpool_run.core.leadership.electorate import MAX_VOTERS, NEVER, Agent
from deadpool_run.ids import NodeId


def wanted(nodes: int) -> int:
    """Return how many of these nodes vote. An even number survives no more losses than the odd one below it."""
    return nodes if nodes <= 2 else min(MAX_VOTERS, nodes - 1 + nodes % 2)


def change(agent: Agent, now: float) -> tuple[NodeId, ...] | None:
    """Return the leader's next voters, of which one is new or gone; None if they are right.

    A new one has answered of late: it extends the leader's authority from the beginning. So has a majority of the present
    voters, which must agree: an addition that waits for one that has failed would hide from the leader that it has.
    """
    voters = agent.configuration.voters
    nodes = (agent.me, *agent.answered_at)
    for voter in voters:
        if voter not in nodes:
            return _without(voters, voter)
    recent = now - agent.timeout_s / 2
    others = [node for node in nodes if node not in voters and agent.answers.get(node, NEVER) > recent]
    share = Counter(domain for voter in voters if (domain := _domain(agent, voter)))  # an unknown one is not shared
    fresh = [node for node in others if not _domain(agent, node) or _domain(agent, node) not in share]
    count = wanted(len(nodes))
    if len(voters) > count:
        return _without(voters, max(voters, key=lambda voter: (voter != agent.me, share[_domain(agent, voter)])))
    answering = sum(voter == agent.me or agent.answers.get(voter, NEVER) > recent for voter in voters)
    if 2 * answering <= len(voters):
        return None
    if len(voters) < count and others:
        return (*voters, (fresh or others)[0])
    crowded = any(number > 1 for number in share.values())
    return (*voters, fresh[0]) if crowded and fresh else None


def _domain(agent: Agent, node: NodeId) -> str:
    return agent.failure_domains.get(node, "")


def _without(voters: tuple[NodeId, ...], one: NodeId) -> tuple[NodeId, ...]:
    return tuple(voter for voter in voters if voter != one)
