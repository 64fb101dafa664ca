"""An agent's handling of the other agents' answers, in order and out of order."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest

from deadpool_run.agent.cluster.leadership import Leadership
from deadpool_run.agent.spec import Cluster
from deadpool_run.core.leadership import election
from deadpool_run.core.leadership import electorate as el
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers
from deadpool_run.wire.auth import Credentials

LONG_S = 1000.0
"""A node time-out within which nothing happens by itself."""


class Body:
    """Nothing may happen to it but this."""

    def __init__(self):
        self.shared = asyncio.Event()
        self.fenced, self.decides = "", []
        self.node = SimpleNamespace(suspend=lambda: None, resume=lambda: None, voters_are=lambda _: None)

    def share(self, _):
        self.shared.set()

    def fence(self, reason):
        self.fenced = reason

    def lease_changed(self, *, regained):
        self.decides.append(regained)


def in_loop(test):
    def run(**given):
        asyncio.run(asyncio.wait_for(test(**given), 20))

    run.__signature__ = inspect.signature(test)
    return run


@pytest.fixture
def body():
    return Body()


def leadership(agent, body):
    return Leadership(agent, [], body, Cluster(endpoints=(), token=b"token", node_name=""), Credentials(b"token"))


def answer(node, leader, sent_at):
    return el.HeardFromAgent(NodeId(node), 0, sent_at, leader.agent.configuration.number)


def join(leader, *nodes):
    leader.handle(el.AgentsJoined({NodeId(node): "" for node in nodes}))


@in_loop
async def test_a_leaders_answers_are_looked_at_together_and_before_anything_else(body):
    now = asyncio.get_running_loop().time()
    leader = leadership(election.first_leader(NodeId("h"), LONG_S, now), body)
    join(leader, "a", "b")
    for node in ("a", "b"):
        leader.answered(answer(node, leader, now))
    leader.handle(el.Tick())
    assert [len(each.voters) for each in leader.agent.configurations] == [1, 2], "one voter more at a time"
    body.shared.clear()
    leader.answered(answer("a", leader, now))
    await body.shared.wait()  # of a configuration that has changed it is found at once that all know it
    for node in ("a", "b"):
        leader.answered(answer(node, leader, now + 5))
    assert max(leader.agent.answers.values()) < now + 5, "there is time"
    leader.handle(el.Tick())
    assert leader.agent.answers == {"a": now + 5, "b": now + 5}
    leader.close()


@in_loop
async def test_an_elected_agent_looks_at_each_answer_at_once(body):
    now = asyncio.get_running_loop().time()
    voters = (NodeId("h"), NodeId("a"), NodeId("b"))
    agent = election.follower(NodeId("a"), LONG_S, (el.Configuration(0, 1, NodeId("h"), voters),), now)
    follower = leadership(agent, body)
    follower.handle(el.LogFollowed(el.LogIndex(0, 1)))
    follower.handle(el.AgentEnded(NodeId("h")))
    for pre_vote in (True, False):
        follower.handle(el.VoteGiven(1, NodeId("b"), pre_vote=pre_vote, granted=True, voted_term=0))
    assert follower.agent.role is el.ElectionRole.ELECTED
    follower.answered(el.HeardFromAgent(NodeId("b"), 1, now, 1))
    assert follower.agent.answers == {"b": now}
    follower.close()


@in_loop
async def test_a_leader_whose_authority_ran_out_unnoticed_decides_nothing_until_a_majority_answers(body):
    """As after a pause of its machine: messages are read before timers run."""
    before = asyncio.get_running_loop().time() - 100
    agent = election.first_leader(NodeId("h"), 5.0, before)
    joined = el.AgentsJoined({NodeId("a"): ""})
    for event in (joined, el.HeardFromAgent(NodeId("a"), 0, before, 1), el.HeardFromAgent(NodeId("a"), 0, before, 2)):
        agent, _ = election.step(agent, event, before)
    leader = leadership(agent, body)
    assert not leader.holds_lease()
    assert body.decides == [False]
    leader.answered(answer("a", leader, asyncio.get_running_loop().time()))
    leader.handle(el.Tick())
    assert leader.holds_lease()
    assert body.decides == [False, True]
    assert not body.fenced
    leader.close()


@in_loop
async def test_a_leader_alone_holds_its_lease(body):
    leader = leadership(election.first_leader(NodeId("h"), 5.0, asyncio.get_running_loop().time() - 100), body)
    assert leader.holds_lease()
    leader.close()


@pytest.mark.parametrize("count", [3, 300])
def test_a_leader_tells_all_others_that_it_leads_through_some_if_they_are_many(body, count):
    @in_loop
    async def main():
        said = []
        leader = leadership(election.first_leader(NodeId("h"), LONG_S, asyncio.get_running_loop().time()), body)
        leader.vote_links.send = lambda peers_, message: said.extend((peer.node, message) for peer in peers_)
        others = [NodeId(f"n{number}") for number in range(count)]
        for number, node in enumerate(others):
            leader.know(peers.Peer(node, "127.0.0.1", 1 + number))
        leader.claim(others)
        told = [(to, claim, [peer.node for peer in claim.relay]) for to, claim in said]
        assert sorted([to for to, _, _ in told] + [node for _, _, relay in told for node in relay]) == sorted(others)
        assert len(told) <= min(count, 20)
        to, claim, relay = told[0]
        said.clear()
        receiver = leadership(election.first_leader(to, LONG_S, asyncio.get_running_loop().time()), body)
        receiver.vote_links.send = leader.vote_links.send
        receiver._on_message(claim, lambda _: None)
        assert [(node, each.agents, each.relay) for node, each in said] == [(node, claim.agents, ()) for node in relay]
        leader.close()
        receiver.close()

    main()
