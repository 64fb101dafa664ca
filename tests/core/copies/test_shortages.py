"""Copies go to nodes that have memory for them, and a node without is tried again ever more rarely."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from kit.invariants import check_invariants

from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import shortages
from deadpool_run.core.events import Place
from deadpool_run.core.settings import Settings

HOUR_S = 3600.0


class Job:
    """The real core, and nodes with memory for copies of so many ranks each (None: of all)."""

    def __init__(self, rooms, ranks_per_node=1, replicas=1):
        self.settings = Settings(world_size=len(rooms) * ranks_per_node, nodes=len(rooms), replicas=replicas)
        self.state = coordinator.new_state(self.settings)
        self.rooms = {f"n{at}": room for at, room in enumerate(rooms)}
        self.held = {node: set() for node in self.rooms}
        """The ranks whose copies each node has."""
        self.now = 0.0
        self.choices = []
        self.announced = []
        first, *others = self.rooms
        self.tell(ev.JobSubmitted(first, Place(first)))
        for node in others:
            self.tell(ev.NodeJoined(node, Place(node)))
        for worker in list(self.state.members):
            self.tell(ev.WorkerStarted(worker, 100 + worker), ev.WorkerReady(worker))
        for member in list(self.state.owners()):
            self.tell(ev.ScriptInitialized(member.worker), ev.TranscriptCompleted(member.worker))
        self.copy()

    def tell(self, *events):
        for event in events:
            effects = coordinator.step(self.settings, self.state, event, self.now)
            check_invariants(self.settings, self.state)
            self.choices += [effect.buddies for effect in effects if isinstance(effect, do.SetBuddies)]
            self.announced += [effect.what for effect in effects if isinstance(effect, do.Announce)]

    def copy(self):
        """Have every rank copied to its buddies, as far as they have memory."""
        state = self.state
        kept = [
            {*(state.former_buddies[rank] if state.former_buddies else ()), *holders}
            for rank, holders in enumerate(state.buddies)
        ]
        for node, ranks in self.held.items():
            ranks -= {rank for rank in ranks if node not in kept[rank]}
        refused = {node: shortage.refused for node, shortage in state.shortages.items()}
        for rank, holders in enumerate(state.buddies):
            for node in holders:
                room = self.rooms[node]
                if room is None or rank in self.held[node] or len(self.held[node]) < room:
                    self.held[node].add(rank)
                    if rank in refused.get(node, ()):
                        self.tell(ev.RefusedCopyTaken(node, rank))
                else:
                    self.tell(ev.CopyRefused(node, rank))
        if self.is_copied():
            self.tell(ev.SnapshotCommitted(1, state.epoch))

    def is_copied(self):
        return all(rank in self.held[node] for rank, nodes in enumerate(self.state.buddies) for node in nodes)

    def run(self, until):
        """Let time pass, with copies after each decision."""
        while (deadline := coordinator.next_deadline(self.settings, self.state)) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.tell(ev.TimeAdvanced())
            self.copy()
        self.now = until


def test_another_node_takes_what_one_has_no_memory_for():
    job = Job([None, 0, None])
    assert not job.is_copied()
    job.run(1.0)
    assert job.is_copied()
    assert all("n1" not in holders for holders in job.state.buddies)
    assert job.announced == ["copies of rank 0 go to n2"]


def test_a_node_keeps_the_copies_for_which_it_has_memory():
    job = Job([None, 1, None], ranks_per_node=2)
    (kept,) = job.held["n1"]
    job.run(1.0)
    assert job.is_copied()
    assert [rank for rank, holders in enumerate(job.state.buddies) if "n1" in holders] == [kept]


def test_refusals_at_one_time_lead_to_one_choice():
    job = Job([None, 0, 0, 0, None])
    before = len(job.choices)
    together_s = shortages.TOGETHER_S + 5 * shortages.TOGETHER_A_RANK_S
    job.run(0.9 * together_s)
    assert len(job.choices) == before
    job.run(together_s)
    assert len(job.choices) == before + 1


def test_a_node_that_has_memory_again_gets_copies_again():
    job = Job([None, 0, None])
    job.run(1.0)
    job.rooms["n1"] = None
    job.run(2 * shortages.FIRST_WAIT_S)
    assert job.is_copied()
    assert job.held["n1"]


def test_the_copies_stay_where_no_other_node_is():
    job = Job([0, 0])
    assert job.state.buddies == (("n1",), ("n0",))
    before = len(job.choices)
    job.run(10 * HOUR_S)
    assert len(job.choices) == before
    job.rooms["n0"] = None
    job.copy()
    assert job.held["n0"] == {1}
    job.run(12 * HOUR_S)
    assert not shortages.is_short(job.state, "n0")
    assert shortages.is_short(job.state, "n1"), "it is tried all the time, as there is no other node"


def test_a_choice_for_another_reason_minds_refusals_too():
    job = Job([None, 0, None])
    job.tell(ev.NodeJoined("n3", Place("n3")))
    assert job.announced == ["copies of rank 0 go to n2"]
    assert coordinator.next_deadline(job.settings, job.state) == job.state.shortages["n1"].until


@given(
    rooms=st.lists(st.sampled_from([None, None, 0, 1, 2]), min_size=2, max_size=6),
    ranks_per_node=st.integers(1, 2),
    replicas=st.integers(1, 2),
)
def test_copies_are_where_there_is_memory_and_do_not_wander(rooms, ranks_per_node, replicas):
    job = Job(rooms, ranks_per_node, replicas)
    began = len(job.choices)
    job.run(5.0)
    if rooms.count(None) > replicas:
        assert job.is_copied()
    settled = len(job.choices)
    assert settled - began <= 2 * len(rooms) * ranks_per_node, "each choice follows the refusal of a rank by a node"
    job.run(24 * HOUR_S)
    tries = (
        sum(1 for wait in itertools.accumulate([60.0] + [2.0] * 40, lambda a, b: min(a * b, HOUR_S)) if wait < HOUR_S)
        + 24
    )
    assert len(job.choices) - settled <= 2 * tries * len(rooms)
    if rooms.count(None) > replicas:
        job.run(job.now + 2.0)
        assert job.is_copied()
