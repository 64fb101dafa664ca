"""The world begins with the first nodes in order, as soon as each of them has enough workers."""

import copy
import random

from kit.invariants import check_invariants

from deadpool_run.core import coordinator, placement
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase


class Start:
    """A job that starts, with orders that are obeyed at random."""

    def __init__(self, nodes, spare_nodes, ranks_per_node, dice):
        self.settings = Settings(world_size=nodes * ranks_per_node, nodes=nodes, spare_nodes=spare_nodes)
        self.state = coordinator.new_state(self.settings)
        self.dice, self.now, self.due, self.joined = dice, 0.0, [], 0

    def tell(self, event):
        self.now += 0.01
        searched = copy.deepcopy(self.state)
        searched.incomplete = None
        expected = coordinator.step(self.settings, searched, event, self.now)
        effects = coordinator.step(self.settings, self.state, event, self.now)
        assert effects == expected
        check_invariants(self.settings, self.state)
        self.due += (order for order in effects if isinstance(order, do.StartWorker | do.KillWorker))

    def join(self):
        node = f"n{self.joined}"
        self.joined += 1
        self.tell(ev.JobSubmitted(node, ev.Place(node)) if node == "n0" else ev.NodeJoined(node, ev.Place(node)))

    def obey(self):
        """Obey one order, or have a worker die, or a node be lost."""
        order = self.due.pop(self.dice.randrange(len(self.due)))
        member = self.state.members.get(order.worker)
        if member is None:
            return
        if isinstance(order, do.KillWorker) or self.dice.random() < 0.1:
            self.tell(ev.WorkerExited(order.worker, None, 9))
        elif self.dice.random() < 0.1 and len(self.state.nodes) > 1:
            awaited = member.node if self.state.incomplete is None else self.state.incomplete[0]
            self.tell(ev.NodesLost((ev.NodeLost(awaited, "power"),)))
        else:
            self.tell(ev.WorkerStarted(order.worker, 100 + order.worker))
            self.tell(ev.WorkerReady(order.worker))


def test_the_first_nodes_get_the_ranks_in_whatever_order_workers_are_ready():
    begun = 0
    for _ in range(100):
        seed = random.SystemRandom().randrange(1 << 32)
        dice = random.Random(seed)
        start = Start(dice.randint(1, 4), dice.randint(0, 4), dice.randint(1, 3), dice)
        start.join()
        try:
            for _ in range(80):
                if start.state.phase not in (JobPhase.NEW, JobPhase.STARTING):
                    begun += 1
                    break
                if start.due and dice.random() < 0.8:
                    start.obey()
                elif start.joined < start.settings.nodes + start.settings.spare_nodes + 4:
                    start.join()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert begun > 10


def test_the_last_workers_of_a_node_are_awaited_without_a_search_for_each_other_worker(monkeypatch):
    """With 10,000 nodes such a search takes 40 ms, and hundreds of workers of spare nodes may come first."""
    searches = []
    in_order = placement.in_order
    monkeypatch.setattr(placement, "in_order", lambda nodes: searches.append(1) or in_order(nodes))
    start = Start(nodes=20, spare_nodes=20, ranks_per_node=4, dice=random.Random(0))
    for _ in range(40):
        start.join()
    late = [order for order in start.due if order.node == "n0"]
    start.tell = lambda event: coordinator.step(start.settings, start.state, event, 1.0)
    for order in [each for each in start.due if each.node != "n0"] + late:
        assert start.state.phase is JobPhase.STARTING
        start.tell(ev.WorkerStarted(order.worker, 100 + order.worker))
        start.tell(ev.WorkerReady(order.worker))
    assert start.state.phase is JobPhase.SETTING_UP
    assert len(searches) <= 6
