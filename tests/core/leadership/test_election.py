"""Rules of the election, one by one; what they add up to is for the search and the simulator."""

from dataclasses import replace
from itertools import pairwise

import pytest
from election_steps import step
from msgspec import structs

from deadpool_run.core.leadership import election, quorum, voters
from deadpool_run.core.leadership import electorate as el

T = 5.0
ROLE = el.ElectionRole


def configuration(*voting, number=3, leader="h", term=0):
    return el.Configuration(term, number, leader, voting)


def follower(me, *voting, configurations=None):
    agent = election.follower(me, T, configurations or (configuration(*voting),), 100.0)
    return election.step(agent, el.LogFollowed(el.LogIndex(0, 1)), 100.0)[0]


def until(agent, now, role):
    """Let time pass until the agent has that role; return it, when, and all that it put out."""
    outputs = []
    while agent.role is not role:
        now = election.next_deadline(agent)
        agent, more = election.step(agent, el.Tick(), now)
        outputs += more
    return agent, now, outputs


def asked(candidate="a", term=1, log=(0, 9), known=(0, 3), *, pre_vote=False):
    return el.VoteAsked(term, candidate, known, el.LogIndex(*log), term - 1, pre_vote)


def granted(agent, question, now):
    _, (answer, *_) = election.step(agent, question, now)
    return answer.vote.granted


def leads(*others, now=100.0):
    """Return a leader of these voters, who have just answered, and know its configuration."""
    voting = ("h", *others)
    agent = replace(election.first_leader("h", T, now), configurations=(configuration(*voting),))
    agent, _ = step(agent, el.AgentsJoined(dict.fromkeys(others, "")), now=now)
    return answer(agent, *others, now=now)[0]


def answer(agent, *others, now, sent_at=None):
    newest, at = agent.configuration.number, now if sent_at is None else sent_at
    return step(agent, *(el.HeardFromAgent(other, agent.term, at, newest) for other in others), now=now)


def test_the_survivor_of_two_goes_on_at_once_if_the_host_of_the_leader_refuses():
    agent, outputs = step(follower("a", "h", "a"), el.AgentRefused("h"), now=101.0)
    assert agent.role is ROLE.LEADER
    assert [type(output) for output in outputs if not isinstance(output, el.RequestVotes | el.ClaimLeadership)] == [
        el.TakeOver,
        el.LoseNode,
        el.ShareConfiguration,
        el.ShareConfiguration,
        el.ShareConfiguration,
    ]
    assert agent.configuration.voters == ("a",)


def test_the_survivor_of_two_stops_its_workers_and_is_fenced_if_the_leader_is_silent():
    _, at, outputs = until(follower("a", "h", "a"), 100.0, ROLE.FENCED)
    assert at == 100.0 + 4 * T
    told = [output for output in outputs if not isinstance(output, el.RequestVotes)]
    assert told == [el.SuspendWorkers(), el.Fence("no leader was heard of for 20 s")]


def test_of_three_a_refused_connection_proves_nothing_and_the_word_of_the_machine_does():
    agent, outputs = step(follower("a", "h", "a", "b"), el.AgentRefused("h"), now=101.0)
    assert (agent.role, outputs) == (ROLE.FOLLOWER, [])
    agent, (pre_vote,) = step(agent, el.AgentEnded("h"), now=101.0)
    assert pre_vote.asked == el.VoteAsked(1, "a", (0, 3), el.LogIndex(0, 1), 0, pre_vote=True)
    voter = follower("b", "h", "a", "b")
    assert not granted(voter, pre_vote.asked, 101.0)
    assert granted(step(voter, el.AgentEnded("h"), now=101.0)[0], pre_vote.asked, 101.0)


def test_a_candidate_is_elected_leads_once_a_majority_knows_and_gives_the_last_leader_up():
    agent, now, outputs = until(follower("a", "h", "a", "b"), 100.0, ROLE.PRECANDIDATE)
    assert now == 100.0 + T
    assert (agent.voted_term, agent.term) == (0, 0), "a pre-vote changes no term"
    yes = el.VoteGiven(1, "b", pre_vote=True, granted=True, voted_term=0)
    agent, (request,) = step(agent, yes, now=now)
    assert (agent.role, agent.voted_term, request.asked.pre_vote) == (ROLE.CANDIDATE, 1, False)
    agent, (claim,) = step(agent, structs.replace(yes, pre_vote=False, voted_term=1), now=now)
    assert agent.role is ROLE.ELECTED
    assert claim.configurations == (configuration("h", "a", "b"), el.Configuration(1, 4, "a", ("h", "a", "b")))
    assert el.SuspendWorkers() in outputs
    agent, outputs = step(agent, el.HeardFromAgent("b", 1, now, 4), now=now)
    assert outputs[:2] == [
        el.TakeOver(claim.configurations[-1]),
        el.LoseNode("h", "it is silent, and its agent does not lead any more"),
    ]
    assert el.ResumeWorkers() in outputs
    assert "h" not in agent.configuration.voters


def test_a_vote_needs_silence():
    agent = follower("b", "h", "a", "b")
    assert not granted(agent, asked(), 100.0 + 0.9 * T)
    assert granted(agent, asked(), 100.0 + T)
    heard = el.HeardFromLeader((configuration("h", "a", "b"),), 1.0)
    agent, _ = step(agent, heard, now=103.0)
    assert not granted(agent, asked(), 103.0 + 0.9 * T)


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(asked(term=0), id="of a term that has passed"),
        pytest.param(asked(log=(0, 0)), id="that knows less of the log"),
        pytest.param(asked(known=(0, 2)), id="that does not know the newest configuration"),
    ],
)
def test_who_is_not_voted_for(question):
    assert not granted(follower("b", "h", "a", "b"), question, 100.0 + T)


def test_one_vote_in_a_term():
    agent, _ = step(follower("b", "h", "a", "b", "c"), asked("a"), now=100.0 + T)
    assert (agent.voted_term, agent.voted_for) == (1, "a")
    assert granted(agent, asked("a"), 100.0 + T), "its answer may have been lost"
    assert not granted(agent, asked("c"), 100.0 + T)
    assert granted(agent, asked("c", term=2), 100.0 + T)


def test_a_voter_extends_the_authority_of_the_old_leader_no_more():
    agent, _ = step(follower("b", "h", "a", "b"), asked("a"), now=100.0 + T)
    assert not election.follows(agent, 0)
    agent, _ = step(agent, el.HeardFromLeader((configuration("h", "a", "b"),), 1.0), now=100.0 + T)
    assert not election.follows(agent, 0)


def test_voters_do_not_ask_all_at_once():
    first, second = (until(follower(me, "h", "a", "b"), 100.0, ROLE.PRECANDIDATE)[1] for me in ("a", "b"))
    assert second - first == T / 8


def test_voters_that_hear_of_the_leaders_end_do_not_ask_all_at_once_either():
    first, second = (step(follower(me, "h", "a", "b"), el.AgentEnded("h"), now=101.0)[0] for me in ("a", "b"))
    assert first.role is ROLE.PRECANDIDATE
    assert second.role is ROLE.FOLLOWER
    assert election.next_deadline(second) == 101.0 + T / 8


def test_who_is_no_voter_or_has_no_log_asks_for_no_votes():
    for agent in (follower("c", "h", "a", "b"), election.follower("a", T, (configuration("h", "a", "b"),), 100.0)):
        assert until(agent, 100.0, ROLE.FENCED)[2] == [el.SuspendWorkers(), el.Fence("no leader was heard of for 20 s")]


def test_answers_that_are_told_together_are_those_told_one_by_one():
    heard = (
        el.HeardFromAgent("a", 0, 101.0, 3),
        el.HeardFromAgent("b", 0, 100.5, 3),
        el.HeardFromAgent("a", 1, 9.9, 9),
    )
    agent = leads("a", "b")
    together, _ = step(agent, el.HeardFromAgents(heard), now=101.0)
    assert together == step(agent, *heard, now=101.0)[0]


def test_a_leader_that_hears_no_majority_decides_nothing_gives_nobody_up_and_may_lead_on():
    agent, outputs = leads("a", "b"), []
    while quorum.holds_lease(agent, now := election.next_deadline(agent)):
        agent, more = step(agent, el.Tick(), now=now)
        outputs += more
    agent, _ = step(agent, el.Tick(), now=now)
    assert (now, outputs) == (100.0 + T, [el.SuspendWorkers()])
    assert agent.role is ROLE.LEADER
    agent, outputs = answer(agent, "a", now=now + 1)
    assert outputs == [el.ResumeWorkers()]
    assert quorum.holds_lease(agent, now + 1)
    agent, outputs = answer(agent, "a", now=now + 0.9 * T)
    assert outputs == [], "the other one is waited for anew"


def test_a_leader_that_regains_no_lease_is_fenced():
    _, at, outputs = until(leads("a", "b"), 100.0, ROLE.FENCED)
    assert at == 100.0 + 4 * T
    assert outputs[-1] == el.Fence("only 1 of the 3 voters have answered, which is no majority")


def test_a_leader_without_authority_falls_silent_in_turn_so_that_another_can_be_elected():
    agent, _ = step(leads("a", "b"), el.Tick(), now=100.0 + T)
    speaks = [quorum.speaks(agent, 100.0 + T + quarter * T / 4) for quarter in range(12)]
    assert speaks == ([True] * 2 + [False] * 6 + [True] * 2 + [False] * 2)


def test_a_leader_gives_up_a_silent_node_after_that_has_stopped_its_workers():
    agent, now, lost = leads("a", "b", "c"), 100.0, []
    while not lost:
        now = min(now + T / 10, election.next_deadline(agent))
        agent, outputs = answer(agent, "a", "b", now=now)
        lost = [output for output in outputs if isinstance(output, el.LoseNode)]
    assert lost[0] == el.LoseNode("c", "it has not answered for 5 s")
    assert now >= 100.0 + T
    node = follower("c", "h", "a", "b", "c")
    node, _ = step(node, el.HeardFromLeader(node.configurations, 1.0), now=100.5)
    node, _ = step(node, el.HeardFromLeader(node.configurations, 2.0, answered=1.0), now=101.5)
    node, _ = step(node, el.HeardFromLeader(node.configurations, 3.0, answered=1.0, lease_from=2.0), now=103.0)
    assert node.governed_at == 100.5, "only the answer to the first heartbeat is known to have come"
    while not node.suspended:
        now = election.next_deadline(node)
        node, _ = election.step(node, el.Tick(), now)
    assert now == 100.5 + 0.9 * T


def test_of_the_times_of_the_leader_only_the_order_counts():
    """Its clock may have stood still while another was elected."""
    node = follower("c", "h", "a", "b", "c")
    node, _ = step(node, el.HeardFromLeader(node.configurations, 1.0), now=101.0)
    node, _ = step(node, el.HeardFromLeader(node.configurations, 2.0, answered=1.0), now=102.0)
    node, _ = step(node, el.HeardFromLeader(node.configurations, 3.0, answered=2.0), now=102.0 + 2 * T)
    late = 103.0 + 2 * T
    node, _ = step(node, el.HeardFromLeader(node.configurations, 4.0, answered=3.0, lease_from=1.5), now=late)
    assert node.governed_at == 100.0, "that heartbeat may have been sent before this node's first answer"
    node, _ = step(node, el.HeardFromLeader(node.configurations, 4.1, answered=3.0, lease_from=2.5), now=late)
    assert node.governed_at == 101.0 + T, "it was sent after the answer to the first heartbeat"
    node, _ = step(node, el.HeardFromLeader(node.configurations, 4.2, answered=3.0), now=late)
    assert node.governed_at == 101.0 + T
    node, _ = step(node, el.HeardFromLeader(node.configurations, 4.3, answered=4.0, lease_from=el.FOREVER), now=late)
    assert node.governed_at == late, "a leader that decides alone"


def test_a_new_leader_was_elected_after_the_last_one_counted_on_this_node():
    known, claimed = configuration("h", "a", "b"), configuration("h", "a", "b", term=1, number=4, leader="a")
    node, now = follower("b", "h", "a"), 100.0 + 2 * T
    node, _ = step(node, el.HeardFromLeader((known, claimed), sent_at=7.0), now=now)
    node, outputs = step(node, el.HeardFromLeader((claimed,), sent_at=7.5, answered=7.0, lease_from=7.0), now=now + 1.0)
    assert (node.governed_at, outputs) == (100.0 + T, []), "else it would wait for one more heartbeat"
    node, _ = step(node, el.HeardFromLeader((claimed,), sent_at=8.0, answered=7.5, lease_from=7.5), now=now + 1.5)
    assert node.governed_at == now + 1.0


def test_claims_alone_keep_nobody_from_being_fenced():
    agent, now = follower("c", "h", "a", "b"), 100.0
    claim = el.HeardFromLeader((configuration("h", "a", "b"), el.Configuration(1, 4, "a", ("h", "a", "b"))))
    while agent.role is not ROLE.FENCED:
        now += T / 10
        agent, _ = step(agent, claim, now=now)
    assert now == pytest.approx(100.0 + 4 * T, abs=T / 10)


def test_whoever_is_given_up_is_fenced_and_whoever_is_superseded_follows_with_its_workers_stopped():
    assert step(follower("a", "h", "a"), el.Evicted(0, "silent"), now=101.0)[1] == [el.Fence("silent")]
    later = el.HeardFromLeader((el.Configuration(1, 4, "a", ("h", "a", "b")),), 1.0)
    agent, outputs = step(leads("a", "b"), later, now=101.0)
    assert (agent.role, agent.term, outputs) == (ROLE.FOLLOWER, 1, [el.SuspendWorkers()])


def test_a_paused_agent_counts_from_when_it_wakes():
    agent, now = follower("a", "h", "a", "b"), 100.0 + 10 * T
    agent, outputs = step(agent, el.Tick(), now=now, awake=False)
    assert outputs == [el.SuspendWorkers()]
    assert until(agent, now, ROLE.PRECANDIDATE)[1] == now + T / 2, "the leader may have been paused, too"
    assert until(agent, now, ROLE.FENCED)[1] >= now + 4 * T


def grow(nodes, now=100.0):
    """Return a leader that all these nodes have joined, once its voters stay the same."""
    agent = election.first_leader("h", T, now, nodes.get("h", ""))
    joined = {node: domain for node, domain in nodes.items() if node != "h"}
    agent, _ = step(agent, el.AgentsJoined(joined), now=now)
    sizes = []
    while not sizes or sizes[-1] != agent.configuration:
        sizes.append(agent.configuration)
        agent, _ = answer(agent, *joined, now=now)
    changes = [{*later.voters} ^ {*earlier.voters} for earlier, later in pairwise(sizes)]
    assert all(len(change) == 1 for change in changes), changes
    return agent


@pytest.mark.parametrize(("nodes", "count"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (6, 5), (100, 5)])
def test_how_many_vote(nodes, count):
    assert voters.wanted(nodes) == count
    agent = grow({f"n{number}": "" for number in range(nodes - 1)})
    assert len(agent.configuration.voters) == count


def test_voters_are_in_different_failure_domains_as_far_as_possible():
    agent = grow({"h": "x", "a": "x", "b": "x", "c": "x", "d": "y", "e": "y", "f": "z"})
    domains = sorted(agent.failure_domains[voter] for voter in agent.configuration.voters)
    assert len(domains) == 5
    assert {*domains} == {"x", "y", "z"}


def test_the_vote_of_a_lost_node_is_given_to_another():
    agent = grow(dict.fromkeys("abcd", ""))
    rest = [node for node in "abcd" if node != agent.configuration.voters[-1]]
    agent, outputs = step(agent, el.AgentEnded(agent.configuration.voters[-1]), now=100.0)
    assert isinstance(outputs[0], el.LoseNode)
    for _ in range(4):
        agent, _ = answer(agent, *rest, now=100.0)
    assert len(agent.configuration.voters) == 3
    assert {*agent.configuration.voters} <= {"h", *rest}
