"""Nodes that come or are lost together are one change; timers of the coordinator outlive a turn of the loop."""

import asyncio
import dataclasses
import socket
from types import SimpleNamespace

import pytest
from kit.ends import Changes, NodeEnd, within_bound
from kit.tagged import tagged_pair

from deadpool_run.agent.cluster.followers import Followers
from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.leadership import election, electorate
from deadpool_run.core.settings import Settings
from deadpool_run.wire import peers

SETTINGS = Settings(world_size=2, nodes=2, join_timeout_s=1000.0)


class FakeLeader:
    """A leader that keeps the events for the coordinator."""

    def __init__(self):
        self.state = coordinator.new_state(SETTINGS)
        self.server = SimpleNamespace(on_entry=None, entries=0)
        self.durable = SimpleNamespace(node_lost=lambda _: None)
        self.told = []

    def submit(self, event):
        self.told.append(event)

    def handle(self, _, report):
        self.submit(report.event)

    def welcome(self, node):
        return (peers.Joined(node, "id", "name", SETTINGS, None),)


AGENTS = peers.Agents((electorate.Configuration(0, 1, "leader", ("leader",)),), ())
LAUNCH = {"--authority": "agents", "argument 1": "--lr", "argument 2": "3"}


def lead():
    agent = election.first_leader("leader", 1000.0, 0.0)
    leadership = SimpleNamespace(agent=agent, heartbeat=lambda: None)
    assert isinstance(agent, electorate.Agent)
    leader = FakeLeader()
    return leader, Followers(leader, leadership, LAUNCH | {"--run-id": "ours"})


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (LAUNCH | {"--authority": "file:/a"}, "--authority is file:/a on node n, but agents in the job"),
        (LAUNCH | {"argument 3": "--fast"}, "argument 3 is --fast on node n, but none in the job"),
        (LAUNCH | {"--run-id": "theirs"}, "--run-id is theirs on node n, but ours in the job: start every node with"),
        (LAUNCH, ""),
    ],
)
def test_a_node_that_was_started_otherwise_is_refused_with_both_values(theirs, why):
    join = peers.Join(ev.Place("n"), theirs)

    async def main():
        _, followers = lead()
        assert (why and why in followers.refusal(join)) or followers.refusal(join) == why
        await followers.end(peers.End(0, ""))

    within_bound(main())


@pytest.mark.parametrize(
    ("founded", "node", "fits"),
    [(0, "n", True), (0, "n~2", True), (3, "n", False), (3, "n~2", False), (3, "n~r3", True), (3, "n~r3~2", True)],
)
def test_a_node_of_an_earlier_founding_cannot_rejoin(founded, node, fits):
    async def main():
        leader, followers = lead()
        coordinator.step(SETTINGS, leader.state, ev.JobSubmitted("leader", ev.Place("leader"), founded), 0.0)
        refusal = followers.refusal(peers.Rejoin(node, ev.Place("n"), ev.NodeResynced(node, ())))
        assert refusal == ("" if fits else f"node {node} was in this run before it was founded again")
        await followers.end(peers.End(0, ""))

    within_bound(main())


def test_losses_of_one_turn_of_the_loop_are_one_fact():
    async def main():
        leader, followers = lead()
        for node in ("n1", "n2", "n3"):
            followers.lose(node, "its agent ended")
        assert leader.told == []
        await asyncio.sleep(0)
        assert leader.told == [ev.NodesLost(tuple(ev.NodeLost(node, "its agent ended") for node in ("n1", "n2", "n3")))]
        followers.lose("n4", "it is silent")
        await asyncio.sleep(0)
        assert leader.told[1:] == [ev.NodeLost("n4", "it is silent")]
        await asyncio.sleep(0)
        assert len(leader.told) == 2
        await followers.end(peers.End(0, ""))

    within_bound(main())


class FakeLeadership(Changes):
    """A leadership that keeps the nodes that joined."""

    def __init__(self):
        super().__init__()
        self.agent = election.first_leader("leader", 1000.0, 0.0)
        self.known, self.joined = [], []
        self.beat = None

    def heartbeat(self):
        return self.beat

    def holds_lease(self):
        return True

    def agents(self):
        return AGENTS

    def know(self, peer):
        self.known.append(peer.node)

    def handle(self, event):
        self.joined.append(list(event.failure_domains))
        self.tell()


def join(followers, name="n", pair=None):
    """Send the greeting of a node, through a pair of sockets if one is given. Return the node's end."""
    ours, theirs = pair or tagged_pair()
    end = NodeEnd(theirs)
    end.send(peers.Join(ev.Place(name), LAUNCH))
    followers.connections.accept(ours)
    return end


def test_a_change_of_the_voters_asks_them_at_once_who_knows_it():
    """Not with the next heartbeat: until a majority knows it, the loss of another voter may end the job."""

    async def main():
        leader, leadership = FakeLeader(), FakeLeadership()
        followers = Followers(leader, leadership, LAUNCH)
        ends = {}
        for name in ("voter", "other"):
            ends[name] = join(followers, name)
            await ends[name].hears(2)
        leadership.beat = peers.Heartbeat(0, 5.0, 1, 2)
        changed = peers.Agents((electorate.Configuration(0, 2, "leader", ("leader", "voter")),), ())
        followers.share(changed)
        agents, beat = (await ends["voter"].hears(4))[2:]
        assert (agents, beat.newest, beat.sent_at) == (changed, 2, 5.0)
        assert (await ends["other"].hears(3))[2:] == [changed]
        await followers.end(peers.End(0, ""))
        for end in ends.values():
            end.close()

    within_bound(main())


def test_a_heartbeat_that_is_due_goes_before_the_next_fact_and_at_once():
    """A turn of the loop that handles ten thousand facts takes seconds, and nodes stop their workers when they hear nothing."""

    async def main():
        leader, leadership = FakeLeader(), FakeLeadership()
        followers = Followers(leader, leadership, LAUNCH)
        _, theirs = pair = tagged_pair()
        end = join(followers, pair=pair)
        await end.hears(2)
        leadership.beat = peers.Heartbeat(0, 5.0, 1, 2)
        followers.handle("n", peers.Fact(ev.TimeAdvanced()))
        with pytest.raises(BlockingIOError):
            theirs.sock.recv(1, socket.MSG_PEEK)
        loop = asyncio.get_running_loop()
        followers._timer.cancel()
        followers._timer = loop.call_at(loop.time() - 1, lambda: None)
        followers.handle("n", peers.Fact(ev.TimeAdvanced()))
        assert b"Heartbeat" in theirs.sock.recv(1 << 10, socket.MSG_PEEK), "and the loop has not turned"
        await followers.end(peers.End(0, ""))
        end.close()

    within_bound(main())


def test_the_end_waits_until_a_majority_has_the_events_of_its_own_turn():
    """An answer to a heartbeat may be handled before they are sent, and is none to them."""

    async def main():
        leader, leadership = FakeLeader(), FakeLeadership()
        leadership.answered = lambda _: None
        leader.mirror = lambda *_: None
        voters = electorate.Configuration(0, 2, "leader", ("leader", "n"))
        leadership.agent = dataclasses.replace(leadership.agent, configurations=(voters,))
        followers = Followers(leader, leadership, LAUNCH)
        end = join(followers)
        await end.hears(2)
        followers.log.followers.add("n")
        leader.server.entries, over = 1, []
        leader.server.on_entry(5.0, ev.StopRequested(0, 1))
        followers.when_known(lambda: over.append(True))
        followers.handle("n", peers.HeartbeatAck(0, 1.0, 2, received=2))
        assert not over
        assert (await end.hears(3))[2] == peers.LogEntries(0, 0, (peers.LogEntry(5.0, ev.StopRequested(0, 1)),))
        assert not over
        followers.handle("n", peers.HeartbeatAck(0, 1.0, 2, received=3))
        assert over
        await followers.end(peers.End(0, ""))
        end.close()

    within_bound(main())


def test_nodes_that_come_in_one_turn_of_the_loop_are_taken_in_together():
    async def main():
        leader, leadership = FakeLeader(), FakeLeadership()
        followers = Followers(leader, leadership, LAUNCH)
        ends = {name: join(followers, name) for name in ("a", "b")}
        for name, end in ends.items():
            assert await end.hears(2) == [peers.Joined(name, "id", "name", SETTINGS, None), AGENTS]
        await leadership.until(lambda: leadership.joined)
        assert leadership.joined == [["a", "b"]]
        assert [event.node for event in leader.told] == leadership.known == ["a", "b"]
        await followers.end(peers.End(0, ""))
        for end in ends.values():
            end.close()

    within_bound(main())


def test_a_deadline_that_stays_keeps_its_timer_and_one_that_is_called_early_gets_another(tmp_path):
    async def main():
        journal = Journal(tmp_path / "journal", SETTINGS)
        server = CoordinatorServer(SETTINGS, lambda _: None, journal, lambda: None)
        server.submit(ev.JobSubmitted("n1"))
        await asyncio.sleep(0)
        first = server._timer
        server.submit(ev.WorkerStarted(99, 1))
        await asyncio.sleep(0)
        assert server._timer is first
        server._reached()  # as a loop does whose clock is coarser than the deadline
        await asyncio.sleep(0)
        assert server._timer is not None
        assert server._timer is not first
        assert server._timer.when() == first.when()
        server.close()
        journal.close()

    within_bound(main())
