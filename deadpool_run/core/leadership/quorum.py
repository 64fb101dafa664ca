"""An agent's conclusions: majorities, the lease, and due times."""

from collections.abc import Collection

from deadpool_run.core.leadership.electorate import FOREVER, NEVER, Agent, Configuration, ElectionRole
from deadpool_run.ids import NodeId

# In node timeouts:
SUSPEND = 0.9
FENCE = 4.0
"""Without a leader; at least this long, since a paused machine counts from when it wakes."""
BLAME = 0.5
"""A leader gives nodes up only while it holds a lease for at least this long: else it may be the one that is cut off."""
ASK_AGAIN = 0.1
PATIENCE = 0.125
"""A voter waits this much longer than the voter before it, so that they do not all ask at once."""
CANDIDACY = 0.5
PROBE, SILENCE = 0.5, 1.5
"""A leader without a lease sends heartbeats for the first time, and none for the second, in turn."""
PAUSE = 0.25
"""An agent that learns of a deadline this late did not run for a while."""


def holds_lease(agent: Agent, now: float) -> bool:
    """Tell whether this agent leads, and no other can have been elected."""
    return agent.role is ElectionRole.LEADER and now < lease_until(agent)


def speaks(agent: Agent, now: float) -> bool:
    """Tell whether the leader sends heartbeats.

    Without a lease it tries to regain one. But where it is heard and hears nothing, no other is elected before it is silent.
    """
    if agent.lapsed_at is None:
        return True
    lapsed = max(agent.lapsed_at, agent.woken_at)
    return (now - lapsed) % ((PROBE + SILENCE) * agent.timeout_s) < PROBE * agent.timeout_s


def has_no_leader(agent: Agent, now: float) -> bool:
    """Tell whether the leader ended, or was silent until it lost this agent's share of its lease."""
    return is_gone(agent, agent.configuration.leader) or now >= agent.heard_at + agent.timeout_s


def is_gone(agent: Agent, other: NodeId) -> bool:
    """Tell whether the agent ended: certainly, or as far as one of two can find out."""
    return other in who_ended(agent)


def who_ended(agent: Agent) -> frozenset[NodeId]:
    """Return the agents that ended: certainly, or as far as one of two can find out."""
    ended = agent.ended | agent.ruled_out
    of_two = len(agent.configurations) == 1 and len(agent.configuration.voters) == 2
    if not of_two or agent.claims or agent.me not in agent.configuration.voters:
        return ended
    return ended | agent.refused.intersection(agent.configuration.voters)


def rival(agent: Agent) -> NodeId | None:
    """Return the voter without which nothing can be decided here, where an external authority decides between the two."""
    if not agent.claims or any(agent.me not in configuration.voters for configuration in agent.configurations):
        return None
    others = set(agent.voting - {agent.me})
    return None if len(others) != 1 or others <= agent.ruled_out else others.pop()


def is_majority(agent: Agent, configuration: Configuration, who: Collection[NodeId]) -> bool:
    """Tell whether these agents decide. Of two agents one decides alone if the other ended."""
    others = [voter for voter in configuration.voters if voter != agent.me]
    gone = agent.ended | (agent.ruled_out if agent.claims else agent.refused)
    if rival(agent) is not None:  # the other may have led in the next term before it ended: only the authority knows
        gone = agent.ruled_out
    alone = len(others) == 1 and len(configuration.voters) == 2 and others[0] in gone
    return configuration.is_majority({*who, others[0]} if alone and agent.me in who else who)


def have_majorities(agent: Agent, who: Collection[NodeId]) -> bool:
    """Tell whether these agents decide in each configuration that counts."""
    return all(is_majority(agent, configuration, who) for configuration in agent.configurations)


def who_know(agent: Agent) -> set[NodeId]:
    """Return the agents that know the newest configuration."""
    newest = agent.configuration.number
    return {agent.me, *(other for other, known in agent.known.items() if known >= newest)}


def lease_until(agent: Agent) -> float:
    """Return when too few will have answered, of some configuration that counts; infinity for one that decides alone."""
    until = FOREVER
    for configuration in agent.configurations:
        if is_majority(agent, configuration, {agent.me}):
            continue
        sent_at = [FOREVER if one == agent.me else agent.answers.get(one, NEVER) for one in configuration.voters]
        until = min(until, sorted(sent_at, reverse=True)[len(sent_at) // 2] + agent.timeout_s)
    return until


def lease_from(agent: Agent, now: float) -> float | None:
    """Return when the heartbeat was sent from which the lease counts; None without one, infinity for one that decides alone."""
    return lease_until(agent) - agent.timeout_s if holds_lease(agent, now) else None


def governed_at(agent: Agent) -> float:
    """Return when this node's workers were last certainly counted on."""
    return lease_until(agent) - agent.timeout_s if agent.role is ElectionRole.LEADER else agent.governed_at


def suspend_at(agent: Agent) -> float:
    """Return when this node stops its workers: others may get their ranks soon after."""
    return governed_at(agent) + SUSPEND * agent.timeout_s


def fence_at(agent: Agent) -> float:
    """Return when the agent waits for a leader, or for a lease, no longer."""
    if agent.role is not ElectionRole.LEADER:
        return max(agent.governed_at, agent.woken_at) + FENCE * agent.timeout_s
    if agent.lapsed_at is None:
        return FOREVER
    return max(agent.lapsed_at, agent.woken_at) + (FENCE - 1) * agent.timeout_s


def candidacy_at(agent: Agent) -> float:
    """Return when the agent asks for votes, if it is a voter and knows the job.

    So does one that the newest configuration leaves out: it may be the only one that knows that configuration.
    """
    if agent.me not in agent.voting or not agent.log.entries:
        return FOREVER
    gone = is_gone(agent, agent.configuration.leader)
    gone_at = agent.gone_at if gone else agent.heard_at + agent.timeout_s
    if rival(agent) is not None:  # of two that cannot hear each other, the leader is to go on
        gone_at += PATIENCE * agent.timeout_s
    return max(gone_at + patience_s(agent), agent.candidacies_from)


def claim_at(agent: Agent) -> float:
    """Return when a leader without a lease claims the next term: the other's workers are stopped by then."""
    other = rival(agent)
    if other is None or agent.lapsed_at is None:
        return FOREVER
    return max(agent.lapsed_at, agent.answered_at.get(other, NEVER) + agent.timeout_s, agent.candidacies_from)


def patience_s(agent: Agent) -> float:
    """Return how much longer this voter waits than the first. One that led, or is being left out, waits longest."""
    return _place(agent, agent.me) * PATIENCE * agent.timeout_s


def precedes(agent: Agent, other: NodeId) -> bool:
    """Tell whether the other voter is to lead rather than this one, if both know as much."""
    return _place(agent, other) < _place(agent, agent.me)


def _place(agent: Agent, voter: NodeId) -> int:
    others = [each for each in agent.configuration.voters if each != agent.configuration.leader]
    return others.index(voter) if voter in others else len(others)
