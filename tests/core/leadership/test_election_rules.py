"""Rules of the election that the search asked for, one by one."""

import pytest
from election_steps import step

from deadpool_run.core.leadership import election, quorum
from deadpool_run.core.leadership import electorate as el

T = 5.0


def configuration(*voters, term=0, number=3, leader="h"):
    return el.Configuration(term, number, leader, voters)


def follower(me, *configurations, entries=1):
    agent = election.follower(me, T, configurations, 100.0)
    return election.step(agent, el.LogFollowed(el.LogIndex(0, entries)), 100.0)[0]


def leader(*others, now=100.0):
    """Return the leader `h` of these voters, which have all just answered."""
    agent = election.first_leader("h", T, now - 1)
    agent, _ = election.step(agent, el.LogFollowed(el.LogIndex(0, 1)), now - 1)
    agent, _ = election.step(agent, el.AgentsJoined(dict.fromkeys(others, "")), now - 1)
    for at in (now - 0.5, now):
        for _ in range(4):  # one voter is added at a time, and each must know the last change
            agent, _ = election.step(agent, answers(agent, *others, sent_at=at), at)
    assert agent.configurations == (agent.configuration,)
    assert set(agent.configuration.voters) == {"h", *others}
    return agent


def answers(agent, *others, sent_at):
    number = agent.configuration.number
    return el.HeardFromAgents(tuple(el.HeardFromAgent(other, agent.term, sent_at, number) for other in others))


def asked(candidate, term, known, voted_term, *, log=(0, 1), pre_vote=True):
    return el.VoteAsked(term, candidate, known.index, el.LogIndex(*log), voted_term, pre_vote)


def test_a_node_whose_workers_are_stopped_notices_a_pause_whenever_it_ends():
    """Without a vote its next deadline is the end of its patience: it left the job if a pause ended just after that."""
    stopped, outputs = step(follower("c", configuration("h", "a", "b")), el.Tick(), now=100.0 + 0.9 * T)
    assert outputs == [el.SuspendWorkers()]
    for end in (2.0, 3.9, 4.0, 4.1, 4.24, 4.26, 9.0):
        woken, outputs = step(stopped, el.Tick(), now=100.0 + end * T, awake=False)
        assert (woken.role, outputs) == (el.ElectionRole.FOLLOWER, [])
        assert woken.woken_at == 100.0 + end * T


@pytest.mark.parametrize("voters", ["ahb", "hb"])
@pytest.mark.parametrize("end", [0.51, 0.85, 0.95, 1.0, 1.14, 1.2, 5.0])
def test_a_node_at_work_notices_a_pause_whenever_it_ends(end, voters):
    """Its next deadline was 0.9 timeouts after the last heartbeat: all paused for longer, it was elected as soon as it woke."""
    now = 100.0 + end * T
    agent, outputs = step(follower("a", configuration(*voters)), el.Tick(), now=now, awake=False)
    assert agent.woken_at == now
    assert (agent.role, outputs) == (el.ElectionRole.FOLLOWER, [el.SuspendWorkers()] if end > 0.9 else [])


def test_a_leader_that_was_paused_gives_up_no_node_whose_answer_comes_second():
    agent, now = leader("a", "b"), 100.0 + 1.1 * T
    agent, outputs = step(agent, answers(agent, "a", sent_at=now), now=now, awake=False)
    assert not [output for output in outputs if isinstance(output, el.LoseNode)]
    agent, outputs = step(agent, answers(agent, "b", sent_at=now), now=now + 0.1)
    assert set(agent.answered_at) == {"a", "b"}


def test_a_leader_gives_up_a_node_that_is_silent_while_it_looks():
    agent, now, lost = leader("a", "b"), 100.0, []
    while not lost:
        now += T / 5
        agent, outputs = step(agent, answers(agent, "a", sent_at=now), now=now)
        lost = [output.node for output in outputs if isinstance(output, el.LoseNode)]
    assert (lost, now) == (["b"], 100.0 + T)


def test_a_leader_that_is_late_again_and_again_gives_up_a_silent_node():
    """On a busy machine: each late look began to count the silence again from zero."""
    agent, now, lost = leader("a", "b"), 100.0, []
    while not lost and now < 100.0 + 5 * T:
        agent, _ = step(agent, answers(agent, "a", sent_at=now), now=now)
        now += 0.6 * T
        agent, outputs = step(agent, answers(agent, "a", sent_at=now), now=now, awake=False)
        assert (agent.woken_at, outputs) == (now, []), "it looked late, and may not have read an answer yet"
        now += 0.2 * T
        agent, outputs = step(agent, answers(agent, "a", sent_at=now), now=now)
        lost = [output.node for output in outputs if isinstance(output, el.LoseNode)]
    assert (lost, now) == (["b"], pytest.approx(100.0 + 2.4 * T))
    assert set(agent.answered_at) == {"a"}


def test_a_leader_that_was_out_of_touch_counts_silence_from_its_return():
    """It nearly lost its lease: the others could not reach it, and need a moment to connect again."""
    agent, outputs = step(leader("a", "b"), el.Tick(), now=100.0 + 0.95 * T)
    assert outputs == [el.SuspendWorkers()]
    now = back = 100.0 + 0.97 * T
    lost = []
    while not lost:
        agent, outputs = step(agent, answers(agent, "a", sent_at=now), now=now)
        lost = [output.node for output in outputs if isinstance(output, el.LoseNode)]
        now += T / 5
    assert (lost, now - T / 5) == (["b"], pytest.approx(back + T))


def test_a_voter_that_the_newest_configuration_leaves_out_can_lead():
    """If it alone knows the change, it refuses the others' candidacies, and one of four is lost already."""
    four, three = configuration("h", "a", "b", "d"), configuration("h", "a", "b", number=4)
    agent, now = follower("d", four, three), 100.0
    while agent.role is not el.ElectionRole.PRECANDIDATE:
        now = election.next_deadline(agent)
        agent, _ = step(agent, el.Tick(), now=now)
        assert agent.role is not el.ElectionRole.FENCED
    for pre_vote in (True, False):
        votes = [el.VoteGiven(1, voter, pre_vote, granted=True, voted_term=0) for voter in "ab"]
        agent, _ = step(agent, *votes, now=now)
    assert agent.role is el.ElectionRole.ELECTED
    assert agent.configuration.voters == ("h", "a", "b", "d")
    known = (el.HeardFromAgent(voter, 1, now, agent.configuration.number) for voter in "ab")
    agent, outputs = step(agent, *known, now=now)
    assert el.TakeOver(configuration("h", "a", "b", "d", term=1, number=5, leader="d")) in outputs


def lapsed_leader(now):
    agent, _ = step(leader("a", "b"), el.Tick(), now=100.0 + T)
    assert agent.lapsed_at == 100.0 + T
    return step(agent, el.Tick(), now=now)[0]


def test_a_leader_without_authority_votes_for_one_that_has_promised_a_later_term_and_answers_it():
    """It cannot lead that voter any more; of three, the two elect nobody without it."""
    now = 100.0 + 1.5 * T
    agent = lapsed_leader(now)
    known = agent.configuration
    agent, outputs = step(agent, asked("a", 1, known, 0, pre_vote=False), now=now)
    assert not any(output.vote.granted for output in outputs), "it may lead the candidate on"
    agent, outputs = step(agent, asked("a", 2, known, 1), asked("a", 2, known, 1, pre_vote=False), now=now)
    assert [output.vote.granted for output in outputs if isinstance(output, el.GiveVote)] == [True, True]
    claimed = configuration("h", "a", "b", term=2, number=known.number + 1, leader="a")
    agent, _ = step(agent, el.HeardFromLeader((known, claimed)), now=now)
    assert (agent.role, agent.term, agent.voted_term, agent.suspended) == (el.ElectionRole.FOLLOWER, 2, 2, True)
    agent, _ = step(agent, el.HeardFromLeader((claimed,), sent_at=now), now=now)
    agent, outputs = step(
        agent, el.HeardFromLeader((claimed,), sent_at=now + 1, answered=now, lease_from=now), now=now + 1
    )
    assert outputs == [el.ResumeWorkers()], "it follows, as others do"


def test_a_new_leader_keeps_the_last_one_if_it_has_answered():
    """It may be needed: of three, the third may have ended."""
    agent, now = follower("a", configuration("h", "a", "b")), 100.0 + T
    agent, _ = step(agent, el.Tick(), now=now)
    for pre_vote in (True, False):
        agent, _ = step(agent, el.VoteGiven(1, "h", pre_vote, granted=True, voted_term=1 - pre_vote), now=now)
    agent, outputs = step(agent, el.HeardFromAgent("h", 1, now, agent.configuration.number), now=now)
    assert [type(output) for output in outputs] == [el.TakeOver, el.ResumeWorkers, el.ShareConfiguration]
    assert "h" in agent.answered_at


def test_a_leader_stands_again_if_a_voter_has_promised_a_later_term_and_knows_less():
    """The voter is deaf to it, and cannot be elected: both would wait until they are fenced."""
    now = 100.0 + 1.5 * T
    agent = lapsed_leader(now)
    older = configuration("h", "a", "b", number=agent.configuration.number - 1)
    agent, outputs = step(agent, asked("a", 3, older, 2), now=now)
    assert not any(output.vote.granted for output in outputs if isinstance(output, el.GiveVote))
    while agent.role is el.ElectionRole.FOLLOWER:
        now = election.next_deadline(agent)
        agent, outputs = step(agent, el.Tick(), now=now)
    (request,) = outputs
    assert (request.asked.term, request.asked.pre_vote, now) == (3, True, 100.0 + 2 * T)
    for pre_vote in (True, False):
        agent, outputs = step(agent, el.VoteGiven(3, "a", pre_vote, granted=True, voted_term=3 - pre_vote), now=now)
    agent, outputs = step(agent, el.HeardFromAgent("a", 3, now, agent.configuration.number), now=now)
    assert [type(output) for output in outputs] == [el.TakeOver, el.ResumeWorkers, el.ShareConfiguration]
    assert agent.configuration.leader == "h", "and it does not give itself up"


def test_an_elected_agent_asks_again_if_a_voter_has_promised_a_later_term():
    agent, now = follower("a", configuration("h", "a", "b")), 100.0 + T
    agent, _ = step(agent, el.Tick(), now=now)
    for pre_vote in (True, False):
        agent, _ = step(agent, el.VoteGiven(1, "h", pre_vote, granted=True, voted_term=1 - pre_vote), now=now)
    assert agent.role is el.ElectionRole.ELECTED
    agent, outputs = step(agent, asked("b", 3, configuration("h", "a", "b"), 2), now=now)
    assert not outputs[0].vote.granted, "the candidate knows less"
    now = election.next_deadline(agent)
    agent, outputs = step(agent, el.Tick(), now=now)
    (request,) = outputs
    assert (request.asked.term, request.asked.pre_vote) == (3, True)


def test_a_heartbeat_that_is_received_late_does_not_count_as_the_claim_of_the_same_time():
    """The leader has the answer to the claim only; the agent slept before the heartbeat came."""
    known, now = configuration("h", "a", "b"), 100.0 + T
    claimed = configuration("h", "a", "b", term=1, number=4, leader="a")
    agent, _ = step(follower("b", known), el.HeardFromLeader((known, claimed), sent_at=50.0), now=now)
    agent, _ = step(
        agent, el.HeardFromLeader((claimed,), sent_at=50.0, answered=50.0, lease_from=50.0), now=now + 2 * T
    )
    agent, _ = step(
        agent, el.HeardFromLeader((claimed,), sent_at=51.0, answered=50.0, lease_from=50.0), now=now + 2 * T
    )
    assert (agent.governed_at, agent.suspended) == (now, True)


def test_an_agent_that_is_cut_off_promises_no_later_term():
    """It would be deaf to the leader. Its question stays a pre-vote until a majority would vote."""
    agent, now = follower("a", configuration("h", "a", "b")), 100.0
    while now < 100.0 + 3 * T:
        now = election.next_deadline(agent)
        agent, _ = step(agent, el.Tick(), now=now)
    assert (agent.role, agent.voted_term) == (el.ElectionRole.PRECANDIDATE, 0)
    agent, _ = step(agent, el.HeardFromLeader((configuration("h", "a", "b"),), sent_at=1.0), now=now)
    assert election.follows(agent, 0)


def test_a_voter_that_is_left_out_asks_after_the_others():
    """Two that ask at the same time, again and again, split the votes of four."""
    four, three = configuration("h", "a", "b", "c"), configuration("h", "b", "c", number=4)
    candidacies = {me: quorum.candidacy_at(follower(me, four, three)) for me in "abc"}
    assert len(set(candidacies.values())) == 3
    assert max(candidacies, key=candidacies.__getitem__) == "a"


def test_no_voter_is_added_while_the_present_ones_may_have_failed():
    """The addition would wait for the voter that failed, and with three voters nobody asks the authority which of two lives."""
    agent, now = leader("a"), 100.0
    agent, _ = step(agent, el.AgentsJoined({"c": ""}), now=now)
    for at in (now + 0.7 * T, now + 0.8 * T):
        agent, _ = step(agent, answers(agent, "c", sent_at=at), now=at)
    assert agent.configuration.voters == ("h", "a")
    agent, _ = step(agent, answers(agent, "a", "c", sent_at=now + 0.9 * T), now=now + 0.9 * T)
    assert set(agent.configuration.voters) == {"h", "a", "c"}


def test_a_lost_voter_is_replaced_in_one_change():
    """In between only two would vote: of four machines a second loss, at that moment, ended the job."""
    agent, now = leader("a", "b"), 100.0
    agent, _ = step(agent, el.AgentsJoined({"d": ""}), now=now)
    at = now + 0.9 * T
    agent, _ = step(agent, answers(agent, "a", "d", sent_at=at), now=at)
    assert agent.configuration.voters == ("h", "a", "b"), "three of four machines vote"
    agent, outputs = step(agent, answers(agent, "a", "d", sent_at=at), now=now + T)
    assert [output.node for output in outputs if isinstance(output, el.LoseNode)] == ["b"]
    assert [each.voters for each in agent.configurations] == [("h", "a", "b"), ("h", "a", "d")]
    agent, _ = step(agent, answers(agent, "a", "d", sent_at=at), now=now + T)
    assert [each.voters for each in agent.configurations] == [("h", "a", "d")]
