"""The coordinator moves to other agents: a swarm of seeds, single outages, and planted bugs."""

import agents
import pytest
from leaders import Cluster, election_simulation, leaders_simulation
from outages import Fault
from planted import ELECTION_PLANTS, LEADER_PLANTS
from workers import Worker

from deadpool_run.core import events as ev
from deadpool_run.core.leadership import quorum
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase

NO_MAJORITY = "only {} of the {} voters have answered, which is no majority"
PARTS = 6
SEEDS = 90
ELECTION_SEEDS = 210


@pytest.mark.parametrize("part", range(PARTS))
def test_swarm_of_leaders(part):
    for seed in range(part, SEEDS, PARTS):
        run(seed, leaders_simulation)


@pytest.mark.parametrize("part", range(PARTS))
def test_swarm_of_elections(part):
    for seed in range(part, ELECTION_SEEDS, PARTS):
        run(seed, election_simulation)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_long_swarm_of_leaders():
    for seed in range(SEEDS, 10 * SEEDS):
        run(seed, leaders_simulation)
    for seed in range(ELECTION_SEEDS, 10 * ELECTION_SEEDS):
        run(seed, election_simulation)


def run(seed, story):
    try:
        story(seed).run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def job(*faults, nodes=4, spare_nodes=0, seed=1, log_delay_s=0.02):
    settings = Settings(
        world_size=nodes - spare_nodes,
        nodes=nodes - spare_nodes,
        spare_nodes=spare_nodes,
        node_timeout_s=agents.T,
        repair_timeout_s=5.0,
        shutdown_timeout_s=3.0,
        join_timeout_s=30.0,
    )
    return Cluster(seed, settings, faults, steps=200, log_delay_s=log_delay_s)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["kill leader", "power leader", "cut leader", "cut deaf leader", "cut mute leader"])
def test_the_leaders_node_is_replaced(kind, seed):
    """The other nodes continue, and the spare node takes the leader's rank. The old leader's workers end."""
    cluster = job(Fault(5.0, kind), spare_nodes=1, seed=seed)
    assert cluster.run() == "every rank finished"
    (incident,) = cluster.state.incidents
    assert [loss.rank for loss in incident.losses] == [0]
    assert incident.steps_repeated <= 1 or cluster.state.capture_interval > 1
    assert cluster.state.term == max(cluster.terms) >= 1


@pytest.mark.parametrize("seed", range(5))
def test_the_part_with_most_voters_continues(seed):
    """The spare nodes have room for the ranks of the other part."""
    cluster = job(Fault(5.0, "cut half leader"), nodes=6, spare_nodes=3, seed=seed)
    assert cluster.run() == "every rank finished"
    ended = [agent for agent in cluster.agents.values() if agent.fenced_why]
    assert {agent.fenced_why for agent in ended} <= {"no leader was heard of for 8 s", NO_MAJORITY.format(2, 5)}
    assert len(ended) == 3


def test_one_of_two_nodes_continues_only_if_the_other_certainly_ended():
    survivor = job(Fault(5.0, "kill leader"), nodes=2, spare_nodes=1)
    assert survivor.run() == "every rank finished"
    assert survivor.leader.name == "n1"
    silent = job(Fault(5.0, "power leader"), nodes=2, spare_nodes=1)
    assert silent.run() == "fenced: no leader was heard of for 8 s"


@pytest.mark.parametrize("seed", range(10))
def test_the_leader_dies_in_a_repair_before_its_last_events_reach_log_followers(seed):
    """A worker dies, a spare is promoted, and the leader ends before its log followers have these events."""
    cluster = job(
        Fault(5.0, "worker", 2), Fault(5.0 + 0.1 * seed, "kill leader"), spare_nodes=1, seed=seed, log_delay_s=3.0
    )
    cluster.run()
    assert cluster.state.term == 1
    assert cluster.state.phase is JobPhase.STOPPED


@pytest.mark.parametrize("kind", ["kill leader", "power leader"])
def test_the_leader_dies_while_a_replacement_sets_up_with_its_store(kind):
    """The replacement waits for the lost store, but no rank waits for the replacement. A timeout fails the simulation."""
    for seed in range(25):
        cluster = job(
            Fault(5.0, "worker", 2), Fault(5.1 + 0.03 * seed, kind), spare_nodes=1, seed=seed, log_delay_s=0.02
        )
        assert cluster.run() == "every rank finished"


def test_a_leader_that_is_cut_off_stops_its_workers_even_if_it_decides_at_that_moment():
    cluster = job(Fault(4.0, "cut leader"))
    leader, clock = cluster.leader, cluster.clock
    while clock.now < 4.5:
        clock.run_next()
    due = quorum.governed_at(leader.mind) + quorum.SUSPEND * agents.T - leader.skew
    clock.at(due + 5e-10, lambda: leader.decide(ev.TimeAdvanced()))  # before its alarm, which is 1e-9 late
    while clock.now < due + 1e-6:
        clock.run_next()
    assert leader.decides()
    assert leader.mind.suspended
    assert all(worker.suspended for worker in cluster.on(leader.name))


def test_the_swarm_reaches_elections_and_fences():
    ends = [(cluster, cluster.run()) for cluster in map(leaders_simulation, range(40))]
    assert sum(end == "every rank finished" for _, end in ends) > 15
    assert sum(end.startswith("fenced") for _, end in ends) > 1
    assert sum(max(cluster.terms) > 0 for cluster, _ in ends) > 10


def test_the_same_seed_is_the_same_story():
    first, second = leaders_simulation(7), leaders_simulation(7)
    first.run()
    second.run()
    assert first.log == second.log


@pytest.mark.parametrize("plant", ELECTION_PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_elections_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert_is_found(election_simulation, 400)


@pytest.mark.parametrize("plant", LEADER_PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_leaders_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert_is_found(lambda seed: leaders_simulation(seed, LEADER_PLANTS[plant]), 150)


def assert_is_found(story, seeds):
    for seed in range(seeds):
        try:
            story(seed).run()
        except AssertionError:
            return
    pytest.fail(f"{seeds} seeds did not find the bug")


def test_steps_that_cannot_be_aborted_while_the_coordinator_moves(monkeypatch):
    """They run their script again with the store of the new coordinator."""
    honest = Worker._assign

    def assign(worker, order):
        honest(worker, order)
        if order.rank % 2 == worker.number % 2:
            worker.breaks.add("abort")

    monkeypatch.setattr(Worker, "_assign", assign)
    jobs = [leaders_simulation(seed) for seed in range(25)]
    for job in jobs:
        job.run()
    assert sum("ReEnter" in line for job in jobs for line in job.log) > 5
