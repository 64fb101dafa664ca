"""The election of the leader: one small state machine in each agent. Pure; `now` is the agent's own clock.

A leader has authority while a majority of its configuration answers. An answer extends it from when the question was *sent*, and
nobody votes for another leader before that long after it *heard* the question: so two never have authority at once, provided
that clocks run at the same rate. A closed connection proves that a process ended; silence proves nothing.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from deadpool_run.core.leadership.electorate import (
    FOREVER,
    NEVER,
    Agent,
    AgentEnded,
    AgentsJoined,
    ClaimLeadership,
    Configuration,
    ElectionRole,
    Event,
    Fence,
    GiveVote,
    HeardFromAgent,
    HeardFromAgents,
    HeardFromLeader,
    LinkBroken,
    LogFollowed,
    LoseNode,
    Output,
    RequestVotes,
    ShareConfiguration,
    TakeOver,
    Tick,
    VoteAsked,
    VoteGiven,
)
from deadpool_run.ids import NodeId


def first_leader(me: NodeId, timeout_s: float, now: float) -> Agent:
    """Return the agent that the job begins with."""
    return Agent(me, timeout_s, ElectionRole.LEADER, (Configuration(1, me, (me,)),), now, now)


def follower(me: NodeId, timeout_s: float, term: int, configurations: tuple[Configuration, ...], now: float) -> Agent:
    """Return an agent that a leader of this term has taken in, with its configurations, of which the newest has the agent."""
    return Agent(me, timeout_s, ElectionRole.FOLLOWER, configurations, now, now, term=term, voted_term=term, seen=term)


def step(agent: Agent, event: Event, now: float) -> tuple[Agent, tuple[Output, ...]]:
    """Return what the agent knows next, and what it is to do. `now` never falls."""
    if agent.role is ElectionRole.FENCED:
        return agent, ()
    agent, outputs = _hear(agent, event, now)
    while agent.role is not ElectionRole.FENCED:
        agent, more = _advance(agent, now)
        outputs += more
        if not more:
            break
    return replace(agent, looked_at=now), outputs


def next_deadline(agent: Agent) -> float | None:
    """Return when `Tick` is to be told, if nothing else happens before."""
    match agent.role:
        case ElectionRole.FENCED:
            return None
        case ElectionRole.LEADER:
            until = _leadership_until(agent)
            fresh_until = until - agent.timeout_s / 2  # from then on it blames nobody
            silent = [_silent_at(agent, other) for other in agent.configuration.agents if other != agent.me]
            until = min([until, *(at for at in silent if agent.looked_at < at < fresh_until)])
            return None if until == FOREVER else until
        case ElectionRole.FOLLOWER | ElectionRole.CANDIDATE:
            due = [agent.governed_at + 2 * agent.timeout_s, *_candidate_term_at(agent)]
            if agent.role is ElectionRole.CANDIDATE:
                due += [max(agent.asked_at, agent.claimed_at) + agent.timeout_s / 10]
            return min(due)


def may_vote(agent: Agent, asked: VoteAsked, now: float) -> bool:
    """Tell whether the candidate is to be voted for."""
    return (
        agent.role is not ElectionRole.LEADER
        and asked.term > agent.term
        and is_free(agent, asked)
        and asked.candidate in agent.configuration.agents
        and asked.configuration >= agent.configuration.number
        and has_no_leader(agent, now)
        and (agent.me not in agent.configuration.log_followers or asked.log >= agent.log)
    )


def is_free(agent: Agent, asked: VoteAsked) -> bool:
    """Tell whether it has voted for nobody else in the term, or in a larger one."""
    return asked.term > agent.voted_term or (asked.term, asked.candidate) == (agent.voted_term, agent.voted_for)


def has_no_leader(agent: Agent, now: float) -> bool:
    """Tell whether the leader ended, or has been silent for so long that it has lost this agent's share of its authority."""
    return agent.closed_at is not None or now >= agent.heard_at + agent.timeout_s


def follows(agent: Agent, term: int) -> bool:
    """Tell whether the agent answers the leader of this term: not if it has voted for another since.

    An answer extends the leader's authority, and the vote has given it away.
    """
    return agent.role in (ElectionRole.FOLLOWER, ElectionRole.CANDIDATE) and agent.term == term >= agent.voted_term


def has_leadership(agent: Agent, now: float) -> bool:
    """Tell whether the leader's authority lasts."""
    return now < _leadership_until(agent)


def _hear(  # noqa: C901, PLR0911 - one case for each fact
    agent: Agent, event: Event, now: float
) -> tuple[Agent, tuple[Output, ...]]:
    match event:
        case HeardFromLeader():
            return _heard_from_leader(agent, event, now)
        case HeardFromAgent():
            return _heard_from_agents(agent, (event,)), ()
        case HeardFromAgents():
            return _heard_from_agents(agent, event.heard), ()
        case LinkBroken():
            if event.closed and agent.closed_at is None and agent.role is not ElectionRole.LEADER:
                return replace(agent, closed_at=now), ()
            return agent, ()  # silence is found by the clock
        case AgentsJoined():
            return _joined(agent, event.agents, now)
        case AgentEnded():
            return replace(agent, ended=agent.ended | {event.agent}), ()
        case LogFollowed():
            return replace(agent, log=max(agent.log, event.log)), ()
        case VoteAsked():
            return _asked(agent, event, now)
        case VoteGiven():
            return _voted(agent, event, now), ()
        case Tick():
            return agent, ()
        case _:
            assert_never(event)


def _heard_from_leader(agent: Agent, event: HeardFromLeader, now: float) -> tuple[Agent, tuple[Output, ...]]:
    if event.term < max(agent.term, agent.voted_term):
        return agent, ()
    if event.term == agent.term and (
        agent.role is ElectionRole.LEADER or event.configurations[-1].number < agent.configuration.number
    ):
        return agent, ()
    if agent.role is ElectionRole.LEADER:
        return _fence(agent, f"another coordinator, of term {event.term}, has taken over")
    if agent.me not in event.configurations[-1].agents:
        return _fence(agent, "the coordinator has given this node up")
    same = event.term == agent.term
    agent = replace(
        agent, role=ElectionRole.FOLLOWER, term=event.term, voted_term=event.term, configurations=event.configurations
    )
    voted_for = agent.voted_for if same else event.configurations[-1].leader
    agent = agent if event.claim else replace(agent, governed_at=now)
    return replace(
        agent,
        heard_at=now,
        closed_at=None,
        voted_for=voted_for,
        candidate_term=0,
        votes=frozenset(),
        prompted_at=FOREVER,
    ), ()


def _heard_from_agents(agent: Agent, heard: Iterable[HeardFromAgent]) -> Agent:
    mine = agent.term if agent.role is ElectionRole.LEADER else agent.candidate_term
    counting = {other for configuration in agent.configurations for other in configuration.agents}
    answers, known = dict(agent.answers), dict(agent.known)
    for each in heard:
        if each.term == mine and each.agent in counting:
            answers[each.agent] = max(each.sent_at, answers.get(each.agent, NEVER))
            known[each.agent] = max(each.configuration, known.get(each.agent, 0))
    return replace(agent, answers=answers, known=known)


def _joined(agent: Agent, others: tuple[NodeId, ...], now: float) -> tuple[Agent, tuple[Output, ...]]:
    new = [other for other in others if other not in agent.configuration.agents]
    if agent.role is not ElectionRole.LEADER or not new:
        return agent, ()
    since = dict.fromkeys(new, now)
    agent = replace(
        agent,
        answers={**agent.answers, **since},
        waits_from={**agent.waits_from, **since},
        ended=agent.ended.difference(new),
    )
    return _set_configuration(agent, (*agent.configuration.agents, *new))


def _set_configuration(agent: Agent, agents: tuple[NodeId, ...]) -> tuple[Agent, tuple[Output, ...]]:
    configurations = (*agent.configurations, Configuration(agent.configuration.number + 1, agent.me, agents))
    return replace(agent, configurations=configurations), (ShareConfiguration(configurations),)


def _asked(agent: Agent, asked: VoteAsked, now: float) -> tuple[Agent, tuple[Output, ...]]:
    granted = may_vote(agent, asked, now)
    if granted:
        agent = replace(agent, voted_term=asked.term, voted_for=asked.candidate)
        if agent.candidate_term < asked.term:  # its own bid is void
            agent = replace(agent, role=ElectionRole.FOLLOWER, candidate_term=0, bids_from=now + agent.timeout_s / 2)
    elif (
        agent.role is ElectionRole.CANDIDATE and asked.log > agent.log
    ):  # who knows more may be elected in its next term
        agent = replace(agent, role=ElectionRole.FOLLOWER, candidate_term=0, bids_from=now + agent.timeout_s)
    elif asked.log < agent.log:
        agent = replace(agent, prompted_at=min(agent.prompted_at, now + agent.timeout_s / 4))
    agent = replace(agent, seen=max(agent.seen, asked.term))
    newer = agent.configurations if agent.configuration.number > asked.configuration else ()
    closed = None if agent.closed_at is None else agent.configuration.leader
    vote = VoteGiven(asked.term, agent.me, granted, closed, agent.voted_term, newer)
    return agent, (GiveVote(asked.candidate, vote),)


def _voted(agent: Agent, vote: VoteGiven, now: float) -> Agent:
    agent = replace(agent, seen=max(agent.seen, vote.voted_term))
    if agent.role is not ElectionRole.CANDIDATE or vote.term != agent.candidate_term:
        return agent
    if (
        vote.configurations
        and vote.configurations[-1].number > agent.configuration.number
        and agent.me in vote.configurations[-1].agents
    ):
        # Somebody was elected, and perhaps got no further: that configuration counts, and that leader may live.
        agent = replace(agent, configurations=vote.configurations, heard_at=now, closed_at=None)
    ended = agent.ended if vote.closed is None else agent.ended | {vote.closed}
    return replace(agent, ended=ended, votes=agent.votes | ({vote.voter} if vote.granted else set()))


def _advance(agent: Agent, now: float) -> tuple[Agent, tuple[Output, ...]]:
    """Do what is due; nothing is due any more when nothing is put out."""
    if agent.role is ElectionRole.LEADER:
        return _advance_leader(agent, now)
    if now >= agent.governed_at + 2 * agent.timeout_s:
        return _fence(agent, f"no coordinator was heard of for {2 * agent.timeout_s:g} s")
    if agent.role is ElectionRole.FOLLOWER:
        return _candidate_term(agent, now) if any(now >= at for at in _candidate_term_at(agent)) else (agent, ())
    return _advance_candidate(agent, now)


def _advance_candidate(agent: Agent, now: float) -> tuple[Agent, tuple[Output, ...]]:
    """Ask again, since messages are lost, until enough have voted; then claim, until enough follow."""
    if not _is_elected(agent, now):
        return _candidate_term(agent, now) if now >= agent.asked_at + agent.timeout_s / 10 else (agent, ())
    followed_by = {other for other, sent_at in agent.answers.items() if now < sent_at + agent.timeout_s}
    if _has_majorities(agent, {agent.me, *followed_by}):
        return _take_over(agent, now)
    if now >= agent.claimed_at + agent.timeout_s / 10:
        return replace(agent, claimed_at=now), (
            ClaimLeadership(agent.candidate_term, (*agent.configurations, _next_configuration(agent))),
        )
    return agent, ()


def _advance_leader(agent: Agent, now: float) -> tuple[Agent, tuple[Output, ...]]:
    if len(agent.configurations) > 1 and _has_majority(
        agent, agent.configurations[0], _who_know(agent, agent.configurations[1].number)
    ):
        configurations = agent.configurations[1:]
        return replace(agent, configurations=configurations), (ShareConfiguration(configurations),)
    if not has_leadership(agent, now):
        configuration = agent.configurations[0]
        left = [other for other in configuration.agents if other == agent.me or _silent_at(agent, other) > now]
        count = f"{len(left)} of the {len(configuration.agents)} nodes"
        return _fence(agent, f"only {count} have answered within {agent.timeout_s:g} s, which is no majority")
    for other in agent.configuration.agents:
        # While too few have answered of late, it may be this node that is cut off: nobody is given up for that.
        is_silent = now >= _silent_at(agent, other) and now < _leadership_until(agent) - agent.timeout_s / 2
        if other != agent.me and (other in agent.ended or is_silent):
            agent, outputs = _set_configuration(
                agent, tuple(each for each in agent.configuration.agents if each != other)
            )
            why = "its agent ended" if other in agent.ended else f"it has not answered for {agent.timeout_s:g} s"
            return agent, (LoseNode(other, why), *outputs)
    return agent, ()


def _candidate_term_at(agent: Agent) -> tuple[float, ...]:
    """Return when the agent asks for votes next, if it is a log follower that has not."""
    if (
        agent.role is not ElectionRole.FOLLOWER
        or agent.me not in agent.configuration.log_followers
        or not agent.log.entries
    ):
        return ()  # who has no log knows of no job
    gone_at = agent.heard_at + agent.timeout_s if agent.closed_at is None else agent.closed_at
    patience_s = agent.configuration.log_followers.index(agent.me) * agent.timeout_s / 2
    return (max(gone_at, agent.bids_from, min(gone_at + patience_s, agent.prompted_at)),)


def _candidate_term(agent: Agent, now: float) -> tuple[Agent, tuple[Output, ...]]:
    """Ask for votes; for those of a larger term if others have voted in one."""
    if agent.role is ElectionRole.FOLLOWER or agent.seen > agent.candidate_term:
        term = max(agent.seen, agent.voted_term, agent.term) + 1
        agent = replace(
            agent,
            role=ElectionRole.CANDIDATE,
            candidate_term=term,
            votes=frozenset({agent.me}),
            answers={},
            known={},
            claimed_at=NEVER,
        )
        agent = replace(agent, voted_term=term, voted_for=agent.me, seen=term)
    if agent.closed_at is not None:
        agent = replace(agent, ended=agent.ended | {agent.configuration.leader})
    return replace(agent, asked_at=now), (
        RequestVotes(VoteAsked(agent.candidate_term, agent.me, agent.log, agent.configuration.number)),
    )


def _is_elected(agent: Agent, now: float) -> bool:
    """Tell whether enough have voted, and the old leader has ended or has lost its authority and ended its workers.

    If the old leader is among the voters, it has already stepped down: a leader never votes.
    """
    gone = agent.ended | agent.votes
    over = agent.configuration.leader in gone or now >= agent.heard_at + 1.25 * agent.timeout_s
    return over and _has_majorities(agent, agent.votes)


def _take_over(agent: Agent, now: float) -> tuple[Agent, tuple[Output, ...]]:
    configuration, leader = _next_configuration(agent), agent.configuration.leader
    agent = replace(
        agent,
        role=ElectionRole.LEADER,
        term=agent.candidate_term,
        configurations=(*agent.configurations, configuration),
        waits_from=dict.fromkeys(configuration.agents, now),
        closed_at=None,
    )
    why = "its agent ended" if leader in agent.ended else "it is silent, and its coordinator has no authority any more"
    return agent, (TakeOver(agent.term, configuration), LoseNode(leader, why))


def _next_configuration(agent: Agent) -> Configuration:
    """Return the configuration without the old leader. Others that ended are given up once the coordinator can be told."""
    agents = tuple(other for other in agent.configuration.agents if other != agent.configuration.leader)
    return Configuration(agent.configuration.number + 1, agent.me, agents)


def _has_majority(agent: Agent, configuration: Configuration, who: frozenset[NodeId] | set[NodeId]) -> bool:
    """Tell whether these are more than half of those that count; where nobody is left, nobody is needed."""
    counting = [other for other in configuration.agents if other not in agent.ended]
    return not counting or 2 * sum(other in who for other in counting) > len(counting)


def _has_majorities(agent: Agent, who: frozenset[NodeId] | set[NodeId]) -> bool:
    """Tell whether these are enough to take over, and no others were enough before them."""
    return all(
        _has_majority(agent, configuration, who) and not _had_successor(agent, configuration)
        for configuration in agent.configurations
    )


def _had_successor(agent: Agent, configuration: Configuration) -> bool:
    """Tell whether the ended agents alone could have elected a later leader.

    It may have taken in agents that no agent here knows.
    """
    others = [other for other in configuration.agents if other != configuration.leader]
    return 2 * sum(other in agent.ended for other in others) > len(others)


def _who_know(agent: Agent, number: int) -> set[NodeId]:
    return {agent.me, *(other for other, known in agent.known.items() if known >= number)}


def _leadership_until(agent: Agent) -> float:
    """Return when too few will have answered, of some configuration that counts; infinity for a leader that is alone."""
    until = FOREVER
    for configuration in agent.configurations:
        counting = [other for other in configuration.agents if other not in agent.ended]
        answers = sorted(
            (FOREVER if other == agent.me else agent.answers.get(other, NEVER) for other in counting),
            reverse=True,
        )
        if counting:
            until = min(until, answers[len(counting) // 2] + agent.timeout_s)
    return until


def _silent_at(agent: Agent, other: NodeId) -> float:
    answered = agent.answers.get(other, NEVER)
    return max(answered, agent.waits_from.get(other, NEVER)) + agent.timeout_s


def _fence(agent: Agent, reason: str) -> tuple[Agent, tuple[Output, ...]]:
    return replace(agent, role=ElectionRole.FENCED), (Fence(reason),)
