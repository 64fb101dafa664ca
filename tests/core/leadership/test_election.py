"""Rules of the election, one by one; what they add up to is for the simulator."""

import pytest

from deadpool_run.core.leadership import election
from deadpool_run.core.leadership import electorate as el

T = 5.0


def configuration(*agents, number=3, leader="h"):
    return el.Configuration(number, leader, agents)


def follower(me, *agents, configurations=None):
    agent = election.follower(me, T, 0, configurations or (configuration(*agents),), 100.0)
    return election.step(agent, el.LogFollowed(el.LogIndex(0, 1)), 100.0)[0]


def step(agent, *events, now):
    outputs = []
    for event in events:
        agent, more = election.step(agent, event, now)
        outputs += more
    return agent, outputs


def asked(candidate="a", term=1, log=(0, 9), number=3):
    return el.VoteAsked(term, candidate, el.LogIndex(*log), number)


def granted(agent, question, now):
    _, (answer, *_) = election.step(agent, question, now)
    return answer.vote.granted


def test_the_survivor_of_two_goes_on_at_once_if_the_leaders_process_ended():
    agent, outputs = step(follower("a", "h", "a"), el.LinkBroken(closed=True), now=101.0)
    assert agent.role is el.ElectionRole.LEADER
    assert [type(output) for output in outputs] == [el.RequestVotes, el.TakeOver, el.LoseNode, el.ShareConfiguration]


def test_the_survivor_of_two_is_fenced_if_the_leader_is_silent():
    agent, now = follower("a", "h", "a"), 100.0
    while agent.role is not el.ElectionRole.FENCED:
        now = election.next_deadline(agent)
        agent, outputs = election.step(agent, el.Tick(), now)
    assert now == 100.0 + 2 * T
    assert outputs == (el.Fence("no coordinator was heard of for 10 s"),)


def test_a_log_follower_that_knows_more_than_a_candidate_waits_for_it_no_longer():
    """It refuses, so that the other may never be elected; both would wait until they are fenced."""
    first = follower("b", "h", "a", "b", "c")
    first, _ = election.step(first, el.LogFollowed(el.LogIndex(0, 10)), 100.0)
    patient, _ = step(first, asked(log=(0, 10)), now=100.0 + T)
    assert election.next_deadline(patient) == 100.0 + 1.5 * T, "the other may be elected, with its vote"
    prompted, (refusal,) = step(first, asked(log=(0, 9)), now=100.0 + T)
    assert not refusal.vote.granted
    assert election.next_deadline(prompted) == 100.0 + 1.25 * T
    _, (candidate_term,) = step(prompted, el.Tick(), now=100.0 + 1.25 * T)
    assert candidate_term == el.RequestVotes(el.VoteAsked(2, "b", el.LogIndex(0, 10), 3))
    led, _ = step(
        prompted, el.HeardFromLeader(3, (configuration("a", "b", "c", leader="a", number=4),)), now=100.0 + 1.1 * T
    )
    assert election.next_deadline(led) == 100.0 + 2.1 * T, "of the next leader it waits as of any"


def test_a_candidate_learns_of_a_configuration_that_another_was_elected_with():
    """Its voters know that one, and vote for nobody who does not."""
    claimed = (configuration("h", "a", "b", "c"), configuration("a", "b", "c", leader="a", number=4))
    candidate, _ = step(follower("b", "h", "a", "b", "c"), el.Tick(), now=100.0 + 1.5 * T)
    assert candidate.role is el.ElectionRole.CANDIDATE
    voter, _ = step(follower("c", "h", "a", "b", "c"), el.HeardFromLeader(1, claimed), now=100.5)
    question = asked("b", term=2, log=(0, 9))
    _, (answer,) = step(voter, question, now=101.0 + T)
    assert (answer.vote.granted, answer.vote.configurations) == (False, claimed)
    vote = el.VoteGiven(1, "c", granted=False, closed=None, voted_term=1, configurations=claimed)
    candidate, _ = step(candidate, vote, now=100.0 + 1.6 * T)
    assert candidate.configurations == claimed
    assert granted(voter, asked("b", term=2, log=(0, 9), number=4), 101.0 + T)
    assert candidate.claimed_at == el.NEVER, "that leader may live, and end its workers late"
    votes = [el.VoteGiven(1, each, granted=True, closed=None, voted_term=1) for each in "ac"]
    _, outputs = step(candidate, *votes, now=100.0 + 1.6 * T)
    assert type(outputs[-1]) is el.ClaimLeadership, "it has voted itself, so that it is none"
    left_out = el.VoteGiven(
        1, "c", granted=False, closed=None, voted_term=1, configurations=(configuration("c", number=9, leader="c"),)
    )
    assert step(candidate, left_out, now=100.0 + 1.7 * T)[0].configurations == claimed


def test_whose_end_a_voter_saw_may_be_another_leaders():
    """It had not heard of the one that is claimed to lead now, and may live."""
    claimed = (configuration("h", "a", "b", "c"), configuration("a", "b", "c", leader="a", number=4))
    candidate, _ = step(follower("b", configurations=claimed), el.Tick(), now=100.0 + 1.5 * T)
    voter, _ = step(follower("c", "h", "a", "b", "c"), el.LinkBroken(closed=True), now=101.0)
    _, (answer,) = step(voter, asked("b", log=(0, 9), number=4), now=101.0 + T)
    assert (answer.vote.granted, answer.vote.closed) == (True, "h")
    told, _ = step(candidate, el.VoteGiven(1, "c", granted=True, closed="h", voted_term=1), now=100.0 + 1.6 * T)
    assert told.ended == {"h"}


def test_a_vote_needs_silence_or_the_end_of_the_leader():
    voter = follower("c", "h", "a", "b", "c")
    assert not granted(voter, asked(), 100.0 + T - 0.01)
    assert granted(voter, asked(), 100.0 + T)
    closed, _ = step(voter, el.LinkBroken(closed=True), now=100.1)
    assert granted(closed, asked(), 100.2)
    broken, _ = step(voter, el.LinkBroken(closed=False), now=100.1)
    assert not granted(broken, asked(), 100.2)


@pytest.mark.parametrize(
    "question",
    [
        asked(number=2),
        asked(candidate="x"),
        asked(term=0),
        pytest.param(asked(candidate="b", log=(0, 8)), id="a shorter log than the log follower's own"),
    ],
)
def test_who_is_not_voted_for(question):
    voter, _ = step(follower("a", "h", "a", "b", "c"), el.LogFollowed(el.LogIndex(0, 9)), now=100.0)
    assert not granted(voter, question, 106.0)


def test_one_vote_in_a_term():
    voter, _ = step(follower("c", "h", "a", "b", "c"), asked("a"), now=106.0)
    assert granted(voter, asked("a"), 106.1)
    assert not granted(voter, asked("b"), 106.1)
    assert granted(voter, asked("b", term=2), 106.1)


def test_the_second_log_follower_waits_longer():
    first, second, third = (follower(me, "h", "a", "b", "c") for me in "abc")
    assert election.next_deadline(first) == 100.0 + T
    assert election.next_deadline(second) == 100.0 + 1.5 * T
    assert election.next_deadline(third) == 100.0 + 2 * T


def head_of(*agents):
    leader = election.first_leader("h", T, 100.0)
    leader, _ = step(leader, *(el.AgentsJoined((agent,)) for agent in agents), now=100.0)
    return answer(leader, *agents, now=100.0)


def answer(leader, *agents, now):
    known = leader.configuration.number
    return step(leader, *(el.HeardFromAgent(agent, 0, now, known) for agent in agents), now=now)[0]


def test_answers_that_are_told_together_are_those_told_one_by_one():
    leader = head_of("a", "b", "c")
    heard = [
        el.HeardFromAgent(*each)
        for each in (("a", 0, 104.0, 9), ("a", 0, 103.0, 8), ("b", 1, 104.0, 9), ("x", 0, 1.0, 1))
    ]
    one_by_one, _ = step(leader, *heard, now=104.5)
    together, _ = step(leader, el.HeardFromAgents(tuple(heard)), now=104.5)
    assert together == one_by_one
    assert (together.answers["a"], together.answers["b"]) == (104.0, 100.0)


def test_a_leader_that_hears_no_majority_is_fenced_and_gives_nobody_up():
    leader = answer(head_of("a", "b", "c"), "a", now=103.0)
    leader, outputs = step(leader, el.Tick(), now=105.0)
    assert outputs == [el.Fence("only 2 of the 4 nodes have answered within 5 s, which is no majority")]


def test_a_leader_gives_up_the_minority_that_is_silent():
    leader = answer(head_of("a", "b", "c"), "a", "b", now=104.0)
    leader, outputs = step(leader, el.Tick(), now=105.0)
    assert outputs[0] == el.LoseNode("c", "it has not answered for 5 s")
    assert leader.configuration.agents == ("h", "a", "b")
    assert len(leader.configurations) == 2, "the old configuration counts until a majority of it knows the new one"
    assert len(answer(leader, "a", "b", now=105.1).configurations) == 1


def test_a_leader_does_not_wait_for_a_time_that_has_passed():
    """Too few had answered when a node fell silent, so that it was not given up; then one more answered, but late."""
    leader = head_of("a", "b", "c", "d", "e")
    leader = answer(leader, "a", "b", now=104.5)
    leader, _ = step(leader, el.HeardFromAgent("c", 0, 102.0, leader.configuration.number), now=104.6)
    leader, outputs = step(leader, el.HeardFromAgent("c", 0, 103.0, leader.configuration.number), now=105.8)
    assert outputs == []
    assert election.next_deadline(leader) > 105.8


@pytest.mark.parametrize(
    ("agents", "ended", "goes_on"), [("ab", "a", True), ("abc", "a", True), ("abc", "ac", False), ("a", "a", False)]
)
def test_who_ended_may_have_led_before_if_they_were_enough(agents, ended, goes_on):
    """With replacements, then, which lead now, and of whom those that are left know nothing."""
    configurations = (configuration("h", *agents, number=2), configuration("h", *dict.fromkeys(f"{agents}b")))
    agent, _ = step(follower("b", configurations=configurations), el.LinkBroken(closed=True), now=101.0)
    agent, _ = step(agent, *(el.AgentEnded(each) for each in ended), now=101.0)
    agent, _ = step(agent, el.Tick(), now=102.0 + T / 2)
    votes = [el.VoteGiven(1, each, granted=True, closed="h", voted_term=1) for each in agents if each not in ended]
    agent, _ = step(agent, *votes, now=102.0 + T / 2)
    answers = [el.HeardFromAgent(vote.voter, 1, 102.0 + T / 2, 4) for vote in votes]
    agent, _ = step(agent, *answers, now=102.0 + T / 2)
    assert (agent.role is el.ElectionRole.LEADER) == goes_on


def test_a_log_follower_that_has_no_log_yet_knows_of_no_job():
    agent = election.follower("a", T, 0, (configuration("h", "a"),), 100.0)
    assert step(agent, el.LinkBroken(closed=True), now=101.0)[1] == []
    assert election.next_deadline(agent) == 100.0 + 2 * T


def test_claims_alone_keep_nobody_from_being_fenced():
    """Two that can hear each other in one direction only would wait for ever."""
    agent = follower("b", "h", "a", "b")
    for at in (104.0, 107.0, 109.9):
        agent, _ = step(
            agent, el.HeardFromLeader(1, (configuration("a", "b", number=4, leader="a"),), claim=True), now=at
        )
    assert agent.term == 1
    assert election.next_deadline(agent) <= 110.0
    agent, _ = step(agent, el.Tick(), now=110.0)
    assert agent.role is el.ElectionRole.FENCED


def test_whoever_is_given_up_or_superseded_is_fenced():
    agent, _ = step(
        follower("a", "h", "a", "b"), el.HeardFromLeader(0, (configuration("h", "b", number=4),)), now=101.0
    )
    assert agent.role is el.ElectionRole.FENCED
    leader, _ = step(
        head_of("a", "b"), el.HeardFromLeader(1, (configuration("a", "b", "h", number=9, leader="a"),)), now=101.0
    )
    assert leader.role is el.ElectionRole.FENCED


def test_a_voter_extends_the_authority_of_the_old_leader_no_more():
    """Its answer to a heartbeat that comes late would let the old leader decide beside the new one."""
    voter = follower("c", "h", "a", "b", "c")
    assert election.follows(voter, 0)
    voter, (answer,) = step(voter, asked(log=(0, 9)), now=100.0 + T)
    assert answer.vote.granted
    assert not election.follows(voter, 0)
    voter, _ = step(voter, el.HeardFromLeader(1, (configuration("a", "b", "c", leader="a", number=4),)), now=101.0 + T)
    assert election.follows(voter, 1)
