"""A swarm of seeds, faults that Hypothesis shrinks, and planted bugs."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leaders import leaders_simulation
from planted import ABORT_PLANTS, NODE_PLANTS, PLANTS
from simulations import KINDS, REFUSAL_KINDS, abort_simulation, memory_simulation, nodes_simulation, simulation
from simulator import REPAIR_TIMEOUT_S, Fault, Simulation

from deadpool_run.core.settings import Settings

SEEDS = 500
SEEDS_FOR_A_PLANT = 300
DURABLE_SEEDS = {nodes_simulation: range(150), leaders_simulation: range(50)}


@pytest.mark.parametrize("part", range(5))
def test_swarm(part):
    for seed in range(part, SEEDS, 5):
        run(seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_long_swarm(part):
    for seed in range(SEEDS + part, 20 * SEEDS, 8):
        run(seed)
    for seed in range(SEEDS + part, 5 * SEEDS, 8):
        run(seed, nodes_simulation)
        run(seed, abort_simulation)


@pytest.mark.parametrize("part", range(3))
def test_swarm_of_nodes(part):
    for seed in range(part, 300, 3):
        run(seed, nodes_simulation)


def test_swarm_of_nodes_without_memory():
    """Nodes refuse copies, other nodes take them, and the coordinator counts on the right nodes."""
    jobs = [memory_simulation(seed) for seed in range(150)]
    for seed, job in enumerate(jobs):
        run(seed, lambda _seed, job=job: job)
    moved = [job for job in jobs if any("has no memory for them" in line for line in job.log)]
    assert len(moved) > 20
    assert sum(job.stopped.exit_code == 0 for job in moved) > len(moved) // 2


def test_swarm_of_steps_that_cannot_be_aborted():
    jobs = [abort_simulation(seed) for seed in range(60)]
    for seed, job in enumerate(jobs):
        run(seed, lambda _seed, job=job: job)
    incidents = [incident for job in jobs for incident in job.state.incidents]
    assert sum(bool(incident.reentered) for incident in incidents) > 20
    assert sum(len(incident.losses) > 1 for incident in incidents if incident.reentered) > 4


def test_swarm_of_refusals():
    """A refusal ends the job in any phase. Only the refusal of a worker that is already being ended is ignored."""
    jobs = [simulation(seed, REFUSAL_KINDS) for seed in range(120)]
    for seed, job in enumerate(jobs):
        run(seed, lambda _seed, job=job: job)
    ends = [job.stopped.exit_code for job in jobs if job.refused and not job.asked_to_stop]
    assert len(ends) > 25
    assert sum(code == 94 for code in ends) > 0.8 * len(ends)
    assert any(job.refused and any("repairing towards" in line for line in job.log) for job in jobs)


def test_with_durable_checkpoints_the_loss_of_every_holder_stops_no_job():
    jobs = [story(seed, durable=True) for story, seeds in DURABLE_SEEDS.items() for seed in seeds]
    begun_again = 0
    for job in jobs:
        job.run()
        begun_again += any("durable checkpoint" in line for line in job.log)
    assert begun_again > 4


def run(seed, story=simulation):
    try:
        story(seed).run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


FAULTS = st.builds(
    Fault,
    at=st.floats(0.0, 8.0, allow_nan=False),
    kind=st.sampled_from(sorted({*KINDS, "stop"})),
    whom=st.integers(0, 5),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    world_size=st.integers(1, 4),
    spares=st.integers(0, 2),
    planned=st.lists(FAULTS, max_size=6),
)
def test_any_faults(seed, world_size, spares, planned):
    """If this fails, the example is the shortest list of faults that Hypothesis found."""
    job = Settings(
        world_size=world_size, spares=spares, repair_timeout_s=REPAIR_TIMEOUT_S, shutdown_timeout_s=3.0, calm_s=1.0
    )
    Simulation(seed, job, tuple(planned), steps=30).run()


def test_the_same_seed_is_the_same_story():
    first, second = simulation(7), simulation(7)
    first.run()
    second.run()
    assert first.log == second.log


def test_the_swarm_reaches_repairs_and_restarts():
    """Most jobs end well despite repairs, losses within repairs, and restarts of the world."""
    sims = [simulation(seed) for seed in range(100)]
    ends = [sim.run() for sim in sims]
    incidents = [incident for sim in sims for incident in sim.state.incidents]
    assert sum(end.exit_code == 0 for end in ends) > 70
    assert len(incidents) > 30
    assert sum(len(incident.losses) > 1 for incident in incidents) > 10
    assert any(not incident.losses for incident in incidents)
    assert sum(sim.state.generation > 0 for sim in sims) > 3


@pytest.mark.parametrize(("plant", "kinds"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS])
def test_a_planted_bug_is_found(plant, kinds, monkeypatch):
    plant(monkeypatch)
    assert_is_found(lambda seed: simulation(seed, kinds))


@pytest.mark.parametrize(("plant", "kinds"), NODE_PLANTS.items(), ids=[plant.__name__ for plant in NODE_PLANTS])
def test_a_planted_bug_of_nodes_is_found(plant, kinds, monkeypatch):
    plant(monkeypatch)
    assert_is_found(lambda seed: nodes_simulation(seed, kinds))


@pytest.mark.parametrize("plant", ABORT_PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_re_entry_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert_is_found(abort_simulation)


def assert_is_found(story):
    for seed in range(SEEDS_FOR_A_PLANT):
        try:
            story(seed).run()
        except AssertionError:
            return
    pytest.fail(f"{SEEDS_FOR_A_PLANT} seeds did not find the bug")
