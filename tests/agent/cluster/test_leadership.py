"""What an agent takes in of the others' answers, and when."""

import asyncio
import inspect

import pytest

from deadpool_run.agent.cluster.leadership import Leadership
from deadpool_run.core.leadership import election
from deadpool_run.core.leadership import electorate as el
from deadpool_run.ids import NodeId

LONG_S = 1000.0
"""A node time-out within which nothing happens by itself."""


class Body:
    """Nothing may happen to it but this."""

    def __init__(self):
        self.shared = asyncio.Event()
        self.fenced = ""

    def share(self, _):
        self.shared.set()

    def fence(self, reason):
        self.fenced = reason


def in_loop(test):
    def run(**given):
        asyncio.run(asyncio.wait_for(test(**given), 20))

    run.__signature__ = inspect.signature(test)
    return run


@pytest.fixture
def body():
    return Body()


def leadership(agent, body):
    return Leadership(agent, {}, body, b"token")


def answer(node, leader, sent_at):
    return el.HeardFromAgent(NodeId(node), 0, sent_at, leader.agent.configuration.number)


@in_loop
async def test_a_leaders_answers_are_looked_at_together_and_before_anything_else(body):
    now = asyncio.get_running_loop().time()
    leader = leadership(election.first_leader(NodeId("h"), LONG_S, now), body)
    for node in ("a", "b"):
        leader.handle(el.AgentsJoined((NodeId(node),)))
    body.shared.clear()
    for node in ("a", "b"):
        leader.answered(answer(node, leader, now))
    await body.shared.wait()  # of a configuration that has changed it is found at once that all know it
    assert len(leader.agent.configurations) == 1
    for node in ("a", "b"):
        leader.answered(answer(node, leader, now + 5))
    assert max(leader.agent.answers.values()) < now + 5, "there is time"
    leader.handle(el.Tick())
    assert leader.agent.answers == {"a": now + 5, "b": now + 5}
    leader.close()


@in_loop
async def test_a_candidate_looks_at_each_answer_at_once(body):
    now = asyncio.get_running_loop().time()
    configuration = el.Configuration(1, NodeId("h"), (NodeId("h"), NodeId("a"), NodeId("b")))
    agent = election.follower(NodeId("a"), LONG_S, 0, (configuration,), now)
    follower = leadership(agent, body)
    follower.handle(el.LogFollowed(el.LogIndex(0, 1)))
    follower.handle(el.LinkBroken(closed=True))
    assert follower.agent.role is el.ElectionRole.CANDIDATE
    follower.answered(el.HeardFromAgent(NodeId("b"), follower.agent.candidate_term, now, 1))
    assert follower.agent.answers == {"b": now}
    follower.close()


@in_loop
async def test_a_leader_whose_authority_ran_out_unnoticed_is_fenced_before_it_decides(body):
    """As after a pause of its machine: messages are read before timers run."""
    before = asyncio.get_running_loop().time() - 100
    agent = election.first_leader(NodeId("h"), 5.0, before)
    agent, _ = election.step(agent, el.AgentsJoined((NodeId("a"), NodeId("b"))), before)
    leader = leadership(agent, body)
    assert not leader.has_authority()
    assert body.fenced
    leader.close()


@in_loop
async def test_a_leader_alone_has_authority(body):
    leader = leadership(election.first_leader(NodeId("h"), 5.0, asyncio.get_running_loop().time() - 100), body)
    assert leader.has_authority()
    leader.close()
