"""Nodes whose loss is found in one turn of the loop are told as one loss; timers of the coordinator outlive it."""

import asyncio
from types import SimpleNamespace

from kit.ends import within_bound

from deadpool_run.agent.assembly import Assembly
from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import coordinator, election, electorate
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.wire import peers

SETTINGS = Settings(world_size=2, nodes=2, join_timeout_s=1000.0)


class Head:
    """Keeps what the coordinator is told."""

    def __init__(self):
        self.state = coordinator.new_state(SETTINGS)
        self.server = SimpleNamespace(on_entry=None, entries=0)
        self.durable = None
        self.told = []

    def submit(self, event):
        self.told.append(event)


class Performer:
    """Performs nothing."""

    def perform(self, effect):
        pass


def lead():
    agent = election.first_head("head", 1000.0, 0.0)
    authority = SimpleNamespace(agent=agent, pulse=lambda: peers.Pulse(0, 0.0, 1, 1))
    assert isinstance(agent, electorate.Agent)
    head = Head()
    return head, Assembly(head, authority, 1)


def test_losses_of_one_turn_of_the_loop_are_one_fact():
    async def main():
        head, assembly = lead()
        for node in ("n1", "n2", "n3"):
            assembly.lose(node, "its agent ended")
        assert head.told == []
        await asyncio.sleep(0)
        assert head.told == [ev.NodesLost(tuple(ev.NodeLost(node, "its agent ended") for node in ("n1", "n2", "n3")))]
        assembly.lose("n4", "it is silent")
        await asyncio.sleep(0)
        assert head.told[1:] == [ev.NodeLost("n4", "it is silent")]
        await asyncio.sleep(0)
        assert len(head.told) == 2
        await assembly.end(peers.End(0, ""))

    within_bound(main())


def test_a_deadline_that_stays_keeps_its_timer_and_one_that_is_called_early_gets_another(tmp_path):
    async def main():
        journal = Journal(tmp_path / "journal", SETTINGS)
        server = CoordinatorServer(SETTINGS, Performer(), journal, lambda: None)
        server.submit(ev.JobSubmitted("n1"))
        first = server._timer
        server.submit(ev.WorkerStarted(99, 1))
        assert server._timer is first
        server._reached()  # as a loop does whose clock is coarser than the deadline
        assert server._timer is not None
        assert server._timer is not first
        assert server._timer.when() == first.when()
        server.close()
        journal.close()

    within_bound(main())
