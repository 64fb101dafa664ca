"""The choice of voters: at most five, in different failure domains as far as possible. One is replaced at a time."""

from collections import Counter

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
    nodes = (agent.me, *agent.answered_at)
    count = wanted(len(nodes))
    recent = now - agent.timeout_s / 2
    answering = sum(voter == agent.me or agent.answers.get(voter, NEVER) > recent for voter in voters)
    others = [node for node in nodes if node not in voters and agent.answers.get(node, NEVER) > recent]
    if 2 * answering <= len(voters):
        others = []
    gone = next((voter for voter in voters if voter not in nodes), None)
    staying = _without(voters, gone)
    share = Counter(domain for voter in staying if (domain := _domain(agent, voter)))  # an unknown one is not shared
    fresh = [node for node in others if not _domain(agent, node) or _domain(agent, node) not in share]
    if len(staying) < count and others:
        return (*staying, (fresh or others)[0])
    if gone is not None:
        return staying
    if len(voters) > count:
        return _without(voters, max(voters, key=lambda voter: (voter != agent.me, share[_domain(agent, voter)])))
    crowded = any(number > 1 for number in share.values())
    return (*voters, fresh[0]) if crowded and fresh else None


def _domain(agent: Agent, node: NodeId) -> str:
    return agent.failure_domains.get(node, "")


def _without(voters: tuple[NodeId, ...], one: NodeId | None) -> tuple[NodeId, ...]:
    return tuple(voter for voter in voters if voter != one)
