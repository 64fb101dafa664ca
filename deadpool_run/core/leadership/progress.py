"""The election's actions at deadlines: ask for votes or for the authority's answer, lead, give nodes up. Pure."""

from dataclasses import replace

from deadpool_run.core.leadership import electorate as el
from deadpool_run.core.leadership import quorum, voters
from deadpool_run.ids import NodeId

_R = el.ElectionRole


def advance(agent: el.Agent, now: float) -> el.StepResult:
    """Do what is due; nothing is due any more when nothing is put out."""
    if now >= quorum.fence_at(agent):
        return fence(agent, _why_alone(agent))
    suspended = now >= quorum.suspend_at(agent)
    if suspended and not agent.suspended:
        return replace(agent, suspended=True), (el.SuspendWorkers(),)
    if agent.suspended and not suspended:
        # A leader was out of touch itself, so that the silence of others until now says nothing about them.
        return replace(agent, suspended=False, answered_at=dict.fromkeys(agent.answered_at, now)), (el.ResumeWorkers(),)
    return _ACTIONS[agent.role](agent, now)


def _follow(agent: el.Agent, now: float) -> el.StepResult:
    if now < quorum.candidacy_at(agent):
        return agent, ()
    return _ask(replace(agent, role=_R.PRECANDIDATE, votes=frozenset({agent.me})), now)


def _sound_out(agent: el.Agent, now: float) -> el.StepResult:
    if quorum.have_majorities(agent, agent.votes):
        return _stand(agent, now)
    return _ask(agent, now) if _is_due_again(agent, now) else (agent, ())


def _campaign(agent: el.Agent, now: float) -> el.StepResult:
    if quorum.have_majorities(agent, agent.votes):
        return _claim(_elected(agent), now)
    if quorum.rival(agent) is None and now >= agent.began_at + quorum.CANDIDACY * agent.timeout_s:
        return _follow(replace(agent, role=_R.FOLLOWER, candidacies_from=now + quorum.patience_s(agent)), now)
    return _request(agent, now) if _is_due_again(agent, now) else (agent, ())


def _establish(agent: el.Agent, now: float) -> el.StepResult:
    if quorum.have_majorities(agent, quorum.who_know(agent)) and now < quorum.lease_until(agent):
        return _take_over(agent, now)
    if not _is_due_again(agent, now):
        return agent, ()
    if agent.seen > agent.candidate_term:  # somebody has voted in a later term, and perhaps hears no claim of this one
        return _ask(replace(agent, role=_R.PRECANDIDATE, votes=frozenset({agent.me})), now)
    return _claim(agent, now)


def _is_due_again(agent: el.Agent, now: float) -> bool:
    return now >= agent.asked_at + quorum.ASK_AGAIN * agent.timeout_s


def _ask(agent: el.Agent, now: float) -> el.StepResult:
    """Ask for promises of votes in a term without votes yet; the authority only for the one after the leader's.

    Who does not know the last leader must not get a later term than who does.
    """
    term = agent.term + 1 if quorum.rival(agent) is not None else max(agent.seen, agent.voted_term, agent.term) + 1
    if term != agent.candidate_term:
        agent = replace(agent, candidate_term=term, votes=frozenset({agent.me}))
    return _request(agent, now)


def _stand(agent: el.Agent, now: float) -> el.StepResult:
    """Begin the candidacy: enough would vote."""
    before, term = agent.voted_term, agent.candidate_term
    agent = replace(
        agent,
        role=_R.CANDIDATE,
        voted_term=term,
        voted_for=agent.me,
        seen=max(agent.seen, term),
        votes=frozenset({agent.me}),
        began_at=now,
    )
    return _request(agent, now, before)


def _request(agent: el.Agent, now: float, voted_term: int | None = None) -> el.StepResult:
    if quorum.rival(agent) is not None:
        return replace(agent, asked_at=now), (el.AskAuthority(agent.candidate_term, agent.role is _R.PRECANDIDATE),)
    asked = el.VoteAsked(
        agent.candidate_term,
        agent.me,
        agent.configuration.index,
        agent.log,
        agent.voted_term if voted_term is None else voted_term,
        pre_vote=agent.role is _R.PRECANDIDATE,
    )
    return replace(agent, asked_at=now), (el.RequestVotes(asked, tuple(sorted(agent.voting - {agent.me}))),)


def _elected(agent: el.Agent) -> el.Agent:
    """Add the first configuration of the term: the voters are the same, and the leader is one of them.

    One that the authority ruled out is none of them: it must not come to know of this term, and claim the one after it.
    """
    last = agent.configuration
    voting = last.voters if agent.me in last.voters else (*last.voters, agent.me)
    if {agent.me} == set(voting) - agent.ruled_out:
        voting = (agent.me,)
    first = el.Configuration(agent.candidate_term, last.number + 1, agent.me, voting)
    configurations = (*agent.configurations, first)
    return replace(agent, role=_R.ELECTED, configurations=configurations, answers={}, known={}, answered_at={})


def _claim(agent: el.Agent, now: float) -> el.StepResult:
    return replace(agent, asked_at=now), (el.ClaimLeadership(agent.configurations),)


def _take_over(agent: el.Agent, now: float) -> el.StepResult:
    """Lead. The last leader's lease is over, so that its workers are stopped: if it is silent, it is given up at once."""
    *before, mine = agent.configurations
    others = {voter for each in (before[-1], mine) for voter in each.voters} - {agent.me}
    agent = replace(
        agent, role=_R.LEADER, term=mine.term, lapsed_at=None, answered_at=dict.fromkeys(others, now), heartbeats={}
    )
    last = {each.leader for each in before} - {agent.me}
    if len(last) != 1:  # another was elected, and perhaps decided nothing: the leader is not certain
        return agent, (el.TakeOver(mine),)
    if last & agent.answers.keys():  # it follows, and its vote may be needed
        return agent, (el.TakeOver(mine),)
    agent, lost = _lose(agent, last.pop(), "it is silent, and its agent does not lead any more")
    return agent, (el.TakeOver(mine), *lost)


def _lead(agent: el.Agent, now: float) -> el.StepResult:
    if now >= quorum.lease_until(agent):
        agent = replace(agent, lapsed_at=now) if agent.lapsed_at is None else agent
        if now < quorum.claim_at(agent) or not _is_due_again(agent, now):
            return agent, ()
        return replace(agent, asked_at=now), (el.AskAuthority(agent.term + 1, pre_vote=True),)
    if agent.lapsed_at is not None:  # and no other was elected
        agent = replace(agent, lapsed_at=None)
    if len(agent.configurations) > 1:
        if quorum.have_majorities(agent, quorum.who_know(agent)):
            agent = replace(agent, configurations=agent.configurations[-1:])
            return agent, (el.ShareConfiguration(agent.configurations),)
    elif (voting := voters.change(agent, now)) is not None:
        last = agent.configuration
        agent = replace(agent, configurations=(last, el.Configuration(agent.term, last.number + 1, agent.me, voting)))
        return agent, (el.ShareConfiguration(agent.configurations),)
    return _give_up(agent, now)


def _give_up(agent: el.Agent, now: float) -> el.StepResult:
    """Lose a node that certainly ended, or that was silent until its workers were stopped."""
    for other in sorted(quorum.who_ended(agent)):
        if other in agent.answered_at:
            return _lose(agent, other, "its agent ended")
    is_fresh = now < quorum.lease_until(agent) - quorum.BLAME * agent.timeout_s
    if is_fresh and now >= min(agent.answered_at.values(), default=now) + agent.timeout_s:
        silent = min(agent.answered_at, key=agent.answered_at.__getitem__)
        return _lose(agent, silent, f"it has not answered for {agent.timeout_s:g} s")
    return agent, ()


def _lose(agent: el.Agent, node: NodeId, silent: str) -> el.StepResult:
    answered_at = dict(agent.answered_at)
    answered_at.pop(node, None)
    why = "its agent ended" if quorum.is_gone(agent, node) else silent
    if node in agent.ruled_out:
        why = "it is silent, and the authority lets this node lead"
    return replace(agent, answered_at=answered_at), (el.LoseNode(node, why),)


def _why_alone(agent: el.Agent) -> str:
    if agent.role is not _R.LEADER:
        return f"no leader was heard of for {quorum.FENCE * agent.timeout_s:g} s"
    voting = agent.configuration.voters
    answered = sum(
        voter == agent.me or agent.looked_at < agent.answers.get(voter, el.NEVER) + agent.timeout_s for voter in voting
    )
    return f"only {answered} of the {len(voting)} voters have answered, which is no majority"


def step_down(agent: el.Agent, now: float) -> el.Agent:
    """Lead no more, and stop the workers. The agent may be elected again, if no other is."""
    lapsed_at = now if agent.lapsed_at is None else agent.lapsed_at
    return replace(
        agent,
        role=_R.FOLLOWER,
        heard_at=lapsed_at - agent.timeout_s,
        governed_at=lapsed_at - agent.timeout_s,
        candidacies_from=now + quorum.CANDIDACY * agent.timeout_s,
        lapsed_at=None,
    )


def fence(agent: el.Agent, reason: str) -> el.StepResult:
    """Leave the election."""
    return replace(agent, role=_R.FENCED), (el.Fence(reason),)


_ACTIONS = {
    _R.FOLLOWER: _follow,
    _R.PRECANDIDATE: _sound_out,
    _R.CANDIDATE: _campaign,
    _R.ELECTED: _establish,
    _R.LEADER: _lead,
}
