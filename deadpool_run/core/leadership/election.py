"""The election of the leader: Raft's, as one small state machine in each agent. Pure; `now` is the agent's own clock.

The only entry of the log is the configuration, so that its newest value is all that is kept. From Raft come terms, votes for
who knows as much, the pre-vote before any term changes, and a majority of each configuration that counts.

A leader holds its lease while a majority of the voters answers. An answer extends it from when the question was *sent*, and no
voter votes for another before that long after it *heard* the question: so no two hold one at once, provided that
clocks run at the same rate. No rank is given away while its worker runs: a node's workers are stopped, by that node's own clock,
before the leader gives the node up. Closed and refused connections prove nothing, except where only two agents vote.

Where there is an external authority, two voters that do not hear each other give no votes: each claims the term after the one
that it knows, and the authority grants it to one of them, once. The other one leaves the job.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from deadpool_run.core.leadership import electorate as el
from deadpool_run.core.leadership import progress, quorum
from deadpool_run.ids import NodeId

_R = el.ElectionRole


def first_leader(  # noqa: PLR0913 - what is known at the beginning
    me: NodeId, timeout_s: float, now: float, failure_domain: str = "", term: int = 0, *, claims: bool = False
) -> el.Agent:
    """Return the agent that the job begins with."""
    alone = (el.Configuration(term, 1, me, (me,)),)
    return replace(follower(me, timeout_s, alone, now, failure_domain, claims=claims), role=_R.LEADER)


def follower(  # noqa: PLR0913 - as above
    me: NodeId,
    timeout_s: float,
    configurations: tuple[el.Configuration, ...],
    asked_at: float,
    failure_domain: str = "",
    *,
    claims: bool = False,
) -> el.Agent:
    """Return an agent that the leader of these configurations has taken in. `asked_at` is when it asked for that."""
    term = configurations[-1].term
    return el.Agent(
        me,
        timeout_s,
        _R.FOLLOWER,
        configurations,
        asked_at,
        asked_at,
        term,
        voted_term=term,
        seen=term,
        looked_at=asked_at,
        failure_domains={me: failure_domain},
        claims=claims,
    )


def step(agent: el.Agent, event: el.Event, now: float) -> el.StepResult:
    """Return what the agent knows next, and what it is to do. `now` never falls."""
    if agent.role is _R.FENCED:
        return agent, ()
    agent, outputs = _hear(_awake(agent, now), event, now)
    while agent.role is not _R.FENCED:
        agent, more = progress.advance(agent, now)
        outputs += more
        if not more:
            break
    return replace(agent, looked_at=now), outputs


def next_deadline(agent: el.Agent) -> float | None:
    """Return when `Tick` is to be told, if nothing else happens before."""
    if agent.role is _R.FENCED:
        return None
    due = [quorum.fence_at(agent)]
    due += [] if agent.suspended else [quorum.suspend_at(agent)]
    if agent.role is not _R.LEADER or agent.answered_at:  # a pause shows in what comes late, so it looks often
        due.append(agent.looked_at + quorum.PAUSE * agent.timeout_s)
    again = agent.asked_at + quorum.ASK_AGAIN * agent.timeout_s
    match agent.role:
        case _R.FOLLOWER:
            due.append(quorum.candidacy_at(agent))
        case _R.PRECANDIDATE | _R.ELECTED:
            due.append(again)
        case _R.CANDIDATE:
            due.append(again)
            due += [agent.began_at + quorum.CANDIDACY * agent.timeout_s] if quorum.rival(agent) is None else []
        case _R.LEADER:
            until = quorum.lease_until(agent)
            silent_at = min(agent.answered_at.values(), default=el.FOREVER) + agent.timeout_s
            due += [until] if agent.lapsed_at is None else [max(quorum.claim_at(agent), again)]
            due += [silent_at] if agent.looked_at < silent_at < until - quorum.BLAME * agent.timeout_s else []
    first = min(due)
    return None if first == el.FOREVER else first


def may_vote(agent: el.Agent, asked: el.VoteAsked, now: float) -> bool:
    """Tell whether the candidate is to be voted for."""
    if asked.term <= agent.term or not is_free(agent, asked) or not knows_as_much(agent, asked):
        return False
    if quorum.rival(agent) is not None:
        return False
    return agent.role is not _R.LEADER and quorum.has_no_leader(agent, now)


def is_free(agent: el.Agent, asked: el.VoteAsked) -> bool:
    """Tell whether it has not voted for another in the term, or in a larger one."""
    return asked.term > agent.voted_term or (asked.term, asked.candidate) == (agent.voted_term, agent.voted_for)


def knows_as_much(agent: el.Agent, asked: el.VoteAsked) -> bool:
    """Tell whether the candidate knows the newest configuration that this agent knows, and of the job's log as much."""
    return (asked.configuration, asked.log) >= (agent.configuration.index, agent.log)


def follows(agent: el.Agent, term: int) -> bool:
    """Tell whether the agent answers the leader of this term: not if it has voted for another since.

    An answer extends the leader's lease, and the vote has given it away.
    """
    return agent.role in (_R.FOLLOWER, _R.PRECANDIDATE) and agent.term == term >= agent.voted_term


# --- facts ----------------------------------------------------------------------------------------------------------


def _awake(agent: el.Agent, now: float) -> el.Agent:
    """Take note if the machine did not run for a while: the silence of others meanwhile proves nothing.

    Their silence before that does: else a leader that is late again and again would never give up one that has ended. But what
    they sent is read first.
    """
    due = next_deadline(agent)
    if due is None or now <= due + quorum.PAUSE * agent.timeout_s:
        return agent
    first = now - (1 - quorum.ASK_AGAIN) * agent.timeout_s
    answered_at = {other: min(now, max(first, at + now - due)) for other, at in agent.answered_at.items()}
    candidacies_from = now + quorum.CANDIDACY * agent.timeout_s
    return replace(agent, woken_at=now, candidacies_from=candidacies_from, answered_at=answered_at)


def _hear(  # noqa: C901, PLR0911, PLR0912 - one case for each fact
    agent: el.Agent, event: el.Event, now: float
) -> el.StepResult:
    match event:
        case el.HeardFromLeader():
            return _heard_from_leader(agent, event, now)
        case el.HeardFromAgent():
            return _heard_from_agents(agent, (event,), now), ()
        case el.HeardFromAgents():
            return _heard_from_agents(agent, event.heard, now), ()
        case el.AgentsJoined():
            if agent.role is not _R.LEADER:
                return agent, ()
            domains = {other: domain for other, domain in event.failure_domains.items() if other != agent.me}
            return replace(
                agent,
                answered_at={**agent.answered_at, **dict.fromkeys(domains, now)},
                failure_domains={**agent.failure_domains, **domains},
                refused=agent.refused.difference(domains),
            ), ()
        case el.AgentEnded():
            return _gone(replace(agent, ended=agent.ended | {event.agent}), event.agent, now), ()
        case el.AgentRefused():
            return _gone(replace(agent, refused=agent.refused | {event.agent}), event.agent, now), ()
        case el.Evicted():
            return progress.fence(agent, event.reason) if event.term >= agent.term else (agent, ())
        case el.LogFollowed():
            return replace(agent, log=max(agent.log, event.log)), ()
        case el.VoteAsked():
            return _asked(agent, event, now)
        case el.VoteGiven():
            return _voted(agent, event), ()
        case el.AuthorityAnswered():
            return _authority_answered(agent, event, now)
        case el.Tick():
            return agent, ()
        case _:
            assert_never(event)


def _gone(agent: el.Agent, other: NodeId, now: float) -> el.Agent:
    return replace(agent, gone_at=max(agent.gone_at, now)) if other == agent.configuration.leader else agent


def _heard_from_leader(agent: el.Agent, event: el.HeardFromLeader, now: float) -> el.StepResult:
    newest = event.configurations[-1]
    if newest.term < max(agent.term, agent.voted_term) or newest.index < agent.configuration.index:
        return agent, ()
    if agent.role is _R.LEADER and newest.term == agent.term:
        return agent, ()
    if agent.role is _R.LEADER:  # the other may need this agent's answers; if not, it gives this node up
        agent = progress.step_down(agent, now)
    governed_at, heartbeats = _governed(agent, event, now)
    return replace(
        agent,
        role=_R.FOLLOWER,
        term=newest.term,
        voted_term=newest.term,
        voted_for=newest.leader,
        seen=max(agent.seen, newest.term),
        configurations=event.configurations,
        heard_at=now,
        governed_at=governed_at,
        heartbeats=heartbeats,
        refused=agent.refused - {newest.leader},
        votes=frozenset(),
    ), ()


def _governed(agent: el.Agent, event: el.HeardFromLeader, now: float) -> tuple[float, Mapping[float, el.Receipt]]:
    """Return until when the agent was certainly counted on, and the heartbeats that matter from now on.

    No other leader was elected within a timeout after the heartbeat was sent from which the lease counts. The leader's clock may
    have stood still, so of its times only the order is used: that heartbeat was sent after this agent's answer to an earlier one.
    """
    governed_at, heartbeats = agent.governed_at, dict(agent.heartbeats)
    if event.configurations[-1].term > agent.term:  # elected after the last leader certainly counted on this agent
        heartbeats = {el.NEVER: el.Receipt(el.NEVER, governed_at)}
    answered = None if event.answered is None else heartbeats.get(event.answered)
    if event.sent_at is not None:  # the claim before the first heartbeat may be of the same time
        heartbeats.setdefault(event.sent_at, el.Receipt(now, el.NEVER if answered is None else answered.at))
    if event.answered is None or event.lease_from is None:
        return governed_at, heartbeats
    if answered is not None:
        before = [receipt.sent_after for sent_at, receipt in heartbeats.items() if sent_at <= event.lease_from]
        until = el.FOREVER if event.lease_from == el.FOREVER else max(before, default=el.NEVER) + agent.timeout_s
        governed_at = max(governed_at, min(answered.at, until))
    both = min(event.answered, event.lease_from)
    first = max((sent_at for sent_at in heartbeats if sent_at <= both), default=el.NEVER)
    return governed_at, {sent_at: receipt for sent_at, receipt in heartbeats.items() if sent_at >= first}


def _heard_from_agents(agent: el.Agent, heard: Iterable[el.HeardFromAgent], now: float) -> el.Agent:
    mine = {_R.LEADER: agent.term, _R.ELECTED: agent.candidate_term}.get(agent.role)
    voting = agent.voting
    answers, known, answered_at = dict(agent.answers), dict(agent.known), dict(agent.answered_at)
    came_from = set()
    for each in heard:
        if each.term != mine:
            continue
        came_from.add(each.agent)
        if each.agent in answered_at:
            answered_at[each.agent] = now
        answers[each.agent] = max(each.sent_at, answers.get(each.agent, el.NEVER))
        if each.agent in voting:
            known[each.agent] = max(each.configuration, known.get(each.agent, 0))
    return replace(
        agent, answers=answers, known=known, answered_at=answered_at, refused=agent.refused.difference(came_from)
    )


def _asked(agent: el.Agent, asked: el.VoteAsked, now: float) -> el.StepResult:
    agent = replace(agent, seen=max(agent.seen, asked.voted_term))
    if agent.role is _R.LEADER and not quorum.holds_lease(agent, now) and asked.voted_term > agent.term:
        # it would rather lead on, but it cannot lead a voter that has voted in a later term
        agent = progress.step_down(agent, now)
    granted = may_vote(agent, asked, now)
    if granted and not asked.pre_vote:
        agent = replace(
            agent,
            role=_R.FOLLOWER,
            voted_term=asked.term,
            voted_for=asked.candidate,
            seen=max(agent.seen, asked.term),
            candidacies_from=now + quorum.CANDIDACY * agent.timeout_s,
        )
    elif granted and agent.role is _R.PRECANDIDATE and quorum.precedes(agent, asked.candidate):  # who knows as much
        agent = replace(agent, role=_R.FOLLOWER, candidacies_from=now + quorum.CANDIDACY * agent.timeout_s)
    leader = agent.configuration.leader
    ended = leader if leader in agent.ended else None
    vote = el.VoteGiven(asked.term, agent.me, asked.pre_vote, granted, agent.voted_term, ended)
    return agent, (el.GiveVote(asked.candidate, vote),)


def _voted(agent: el.Agent, vote: el.VoteGiven) -> el.Agent:
    ended = agent.ended if vote.ended is None else agent.ended | {vote.ended}
    agent = replace(agent, seen=max(agent.seen, vote.voted_term), ended=ended)
    wanted = agent.role is (_R.PRECANDIDATE if vote.pre_vote else _R.CANDIDATE)
    if not (wanted and vote.granted and vote.term == agent.candidate_term):
        return agent
    return replace(agent, votes=agent.votes | {vote.voter})


def _authority_answered(agent: el.Agent, answer: el.AuthorityAnswered, now: float) -> el.StepResult:
    rival = quorum.rival(agent)
    leads = agent.role is _R.LEADER and not quorum.holds_lease(agent, now)
    wanted = agent.term + 1 if leads else agent.candidate_term
    asks = leads or agent.role is (_R.PRECANDIDATE if answer.pre_vote else _R.CANDIDATE)
    if rival is None or not asks or answer.term != wanted:
        return agent, ()
    if not answer.granted:
        return progress.fence(agent, f"the authority has given term {answer.term} to another node, or the run is over")
    if not answer.pre_vote:
        return replace(agent, ruled_out=agent.ruled_out | {rival}), ()
    if leads:
        agent = replace(progress.step_down(agent, now), role=_R.PRECANDIDATE, candidate_term=wanted)
    return replace(agent, votes=frozenset({agent.me, rival})), ()
