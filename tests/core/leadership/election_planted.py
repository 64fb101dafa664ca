"""Mistakes that the search of `election_search` has to find, each as what it replaces."""

from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import structs

from deadpool_run.core.leadership import election, progress, quorum
from deadpool_run.core.leadership import electorate as el

ROLE = el.ElectionRole


class Planted(NamedTuple):
    """One mistake, and where to look for it."""

    name: str
    breaks: str
    """The invariants that it may break."""
    patches: tuple[tuple[Any, str, Any], ...]
    start: str = "three"
    kinds: tuple[str, ...] = ("cut", "sleep", "hold", "end", "order")
    most: int = 4
    calm: bool = False
    tries: int = 5_000


def _votes_twice(agent: el.Agent, asked: el.VoteAsked) -> bool:
    return asked.term > agent.voted_term or (asked.term == agent.voted_term and agent.role is ROLE.FOLLOWER)


def _votes_while_it_hears(agent: el.Agent, asked: el.VoteAsked, now: float) -> bool:
    return asked.term > agent.term and election.is_free(agent, asked) and election.knows_as_much(agent, asked)


def _without_refused(agent: el.Agent, configuration: el.Configuration, who: Any) -> bool:
    voters = [voter for voter in configuration.voters if voter in who or voter not in agent.ended | agent.refused]
    return 2 * sum(voter in who for voter in voters) > len(voters)


def _answers_always(agent: el.Agent, term: int) -> bool:
    return agent.role in (ROLE.FOLLOWER, ROLE.PRECANDIDATE) and agent.term == term


_HEARD_FROM_LEADER = election._heard_from_leader


def _hears_the_old_leader(agent: el.Agent, event: el.HeardFromLeader, now: float) -> Any:
    voted_term, voted_for = agent.voted_term, agent.voted_for
    if event.configurations[-1].term != agent.term:
        return _HEARD_FROM_LEADER(agent, event, now)
    agent, outputs = _HEARD_FROM_LEADER(replace(agent, voted_term=agent.term), event, now)
    return replace(agent, voted_term=voted_term, voted_for=voted_for), outputs


def _knows_the_configuration(agent: el.Agent, asked: el.VoteAsked) -> bool:
    return asked.configuration >= agent.configuration.index


def _knows_the_log(agent: el.Agent, asked: el.VoteAsked) -> bool:
    return asked.log >= agent.log


def _counted_at_once(agent: el.Agent, event: el.HeardFromLeader, now: float) -> Any:
    after, outputs = _HEARD_FROM_LEADER(agent, event, now)
    return (replace(after, governed_at=now) if after.heard_at == now else after), outputs


_GOVERNED = election._governed


def _believes_the_lease(agent: el.Agent, event: el.HeardFromLeader, now: float) -> Any:
    lease_from = None if event.lease_from is None else el.FOREVER
    return _GOVERNED(agent, structs.replace(event, lease_from=lease_from), now)


def _gives_up_early(agent: el.Agent, now: float) -> Any:
    for other, at in agent.answered_at.items():
        if quorum.is_gone(agent, other) or now >= at + agent.timeout_s / 2:
            return progress._lose(agent, other, "it is silent")
    return agent, ()


_HEARD_FROM_AGENTS = election._heard_from_agents


def _counts_from_the_receipt(agent: el.Agent, heard: Any, now: float) -> Any:
    return _HEARD_FROM_AGENTS(agent, [structs.replace(each, sent_at=now) for each in heard], now)


def _takes_over_at_once(agent: el.Agent, now: float) -> Any:
    agent, claims = progress._claim(agent, now)
    fresh = dict.fromkeys(agent.configuration.voters, now)
    agent, outputs = progress._take_over(replace(agent, answers=fresh), now)
    return agent, (*claims, *outputs)


_MAY_VOTE = election.may_vote


def _leader_votes(agent: el.Agent, asked: el.VoteAsked, now: float) -> bool:
    return _MAY_VOTE(replace(agent, role=ROLE.FOLLOWER), asked, now) or (
        agent.role is ROLE.LEADER and asked.term > agent.voted_term
    )


def _follows_old_terms(agent: el.Agent, event: el.HeardFromLeader, now: float) -> Any:
    term = event.configurations[-1].term
    if agent.role is ROLE.FOLLOWER and term < agent.term:
        agent = replace(agent, term=term, voted_term=term, configurations=event.configurations)
    return _HEARD_FROM_LEADER(agent, event, now)


def _awake_always(agent: el.Agent, now: float) -> el.Agent:
    return agent


def _everybody_knows(agent: el.Agent) -> set[Any]:
    return {agent.me, *agent.configuration.voters}


def _never_steps_down(agent: el.Agent, now: float) -> el.Agent:
    return agent


_STEP_DOWN = progress.step_down


def _fenced(agent: el.Agent, now: float) -> el.Agent:
    return replace(_STEP_DOWN(agent, now), role=ROLE.FENCED)


_CANDIDACY_AT = quorum.candidacy_at


def _newest_voters_stand(agent: el.Agent) -> float:
    return _CANDIDACY_AT(agent) if agent.me in agent.configuration.voters else el.FOREVER


def _always(*_: Any) -> bool:
    return True


def _is_refused(agent: el.Agent, other: Any) -> bool:
    return other in agent.ended | agent.refused


def _alone_if_refused(agent: el.Agent, configuration: el.Configuration, who: Any) -> bool:
    return _IS_MAJORITY(replace(agent, claims=False), configuration, who)


_IS_MAJORITY = quorum.is_majority
_AUTHORITY_ANSWERED = election._authority_answered


def _needs_no_claim(agent: el.Agent, answer: el.AuthorityAnswered, now: float) -> Any:
    other = quorum.rival(agent)
    agent, outputs = _AUTHORITY_ANSWERED(agent, answer, now)
    return (replace(agent, ruled_out=agent.ruled_out | {other}) if answer.granted and other else agent), outputs


def _claims_at_once(agent: el.Agent) -> float:
    return el.FOREVER if quorum.rival(agent) is None or agent.lapsed_at is None else agent.lapsed_at


def _heeds_no_refusal(agent: el.Agent, answer: el.AuthorityAnswered, now: float) -> Any:
    return _AUTHORITY_ANSWERED(agent, structs.replace(answer, granted=True), now)


_ELECTED = progress._elected


def _keeps_who_was_ruled_out(agent: el.Agent) -> el.Agent:
    return replace(_ELECTED(replace(agent, ruled_out=frozenset())), ruled_out=agent.ruled_out)


def _nobody(_: el.Agent) -> None:
    return None


PLANTED = (
    Planted(
        "an agent votes twice in a term",
        "ABCDE",
        ((election, "is_free", _votes_twice),),
        start="five",
        kinds=("end", "hold", "order"),
    ),
    Planted(
        "an agent votes while it hears the leader",
        "AD",
        ((quorum, "has_no_leader", _always),),
        start="a leader that is heard late",
    ),
    Planted(
        "refused agents are left out of three",
        "AD",
        ((quorum, "is_majority", _without_refused),),
        start="a leader that is cut off",
        kinds=("refuse", "cut"),
    ),
    Planted(
        "the old leader is answered after a vote",
        "AD",
        ((election, "follows", _answers_always), (election, "_heard_from_leader", _hears_the_old_leader)),
        start="a leader that is heard late",
        kinds=("hold", "order"),
    ),
    Planted(
        "a vote does not compare the logs",
        "G",
        ((election, "knows_as_much", _knows_the_configuration),),
        start="an entry that is not known",
        kinds=("hold", "order"),
    ),
    Planted(
        "a vote does not compare the configurations",
        "ACG",
        ((election, "knows_as_much", _knows_the_log),),
        start="a change that is not known",
        kinds=("hold", "order"),
    ),
    Planted("a heartbeat counts before it is confirmed", "D", ((election, "_heard_from_leader", _counted_at_once),)),
    Planted(
        "a leader is believed whose clock stood still",
        "D",
        ((election, "_governed", _believes_the_lease),),
        start="a leader whose clock stood still",
        kinds=("hold", "cut"),
    ),
    Planted("a node is given up after half of the time", "D", ((progress, "_give_up", _gives_up_early),)),
    Planted("workers are stopped late", "D", ((quorum, "SUSPEND", 1.25),)),
    Planted("a lease counts from the receipt", "A", ((election, "_heard_from_agents", _counts_from_the_receipt),)),
    Planted(
        "an elected agent leads before others know",
        "ABCDEG",
        ((progress, "_ACTIONS", {**progress._ACTIONS, ROLE.ELECTED: _takes_over_at_once}),),
        start="one grows to three",
    ),
    Planted(
        "a change is decided before others know",
        "ABCG",
        ((quorum, "who_know", _everybody_knows),),
        start="one grows to three",
    ),
    Planted(
        "a leader with a lease votes",
        "ACDEG",
        ((election, "may_vote", _leader_votes),),
        start="a leader that is heard late",
        kinds=("hold", "order", "cut"),
    ),
    Planted(
        "an older leader is followed again",
        "ABCD",
        ((election, "_heard_from_leader", _follows_old_terms),),
        start="a leader that is heard late",
        kinds=("hold", "order", "cut"),
    ),
    Planted(
        "a leader without a lease never steps down",
        "E",
        ((progress, "step_down", _never_steps_down),),
        start="a silent leader",
    ),
    Planted("a leader that votes is fenced", "E", ((progress, "step_down", _fenced),), start="a silent leader"),
    Planted(
        "a voter that is left out never asks",
        "E",
        ((quorum, "candidacy_at", _newest_voters_stand),),
        start="a voter that is left out",
        kinds=("order", "hold"),
    ),
    Planted(
        "a refused connection decides, although there is an authority",
        "AD",
        ((quorum, "is_gone", _is_refused), (quorum, "is_majority", _alone_if_refused)),
        start="two with an authority",
        kinds=("refuse", "cut"),
    ),
    Planted(
        "a claim is not awaited",
        "ABD",
        ((election, "_authority_answered", _needs_no_claim),),
        start="two with an authority, and no link",
        kinds=("hold", "order"),
    ),
    Planted(
        "a refusal of the authority is not heeded",
        "ABD",
        ((election, "_authority_answered", _heeds_no_refusal),),
        start="two with an authority, and no link",
        kinds=("hold", "order"),
    ),
    Planted(
        "a leader claims before the other's workers are stopped",
        "D",
        ((quorum, "claim_at", _claims_at_once),),
        start="two with an authority, and a late heartbeat",
        kinds=("cut", "order"),
        most=2,
    ),
    Planted(
        "who was ruled out votes in the new term",
        "ACD",
        ((progress, "_elected", _keeps_who_was_ruled_out),),
        start="two with an authority, and no link",
        kinds=("cut", "order"),
    ),
    Planted(
        "the authority is not asked",
        "E",
        ((quorum, "rival", _nobody),),
        start="two with an authority",
        kinds=("end", "order"),
    ),
    Planted("a pause is not noticed", "F", ((election, "_awake", _awake_always),), kinds=("all", "order"), calm=True),
    Planted("a leader counts its own pause", "F", ((quorum, "PAUSE", 0.9),), kinds=("all", "order"), calm=True),
)
