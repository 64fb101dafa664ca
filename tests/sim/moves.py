"""Jobs in which ranks and nodes are drained, mostly without a fault."""

import random

from simulations import nodes_simulation
from simulator import REPAIR_TIMEOUT_S, Fault, Simulation

from deadpool_run.core.settings import Settings

_FAULTS = ("kill rank", "kill rank", "kill parked", "freeze rank", "suspect", "inject", "attach", "abort")


def check_moves(job: Simulation) -> None:
    """Assert that every drain gets the ranks that it waits for, and that no move repeats a step."""
    assert not any("could not move within" in line for line in job.log), "the wait for ranks timed out"
    assert all(incident.steps_repeated == 0 for incident in job.moved)


def _drains(rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    at, found = rng.uniform(1.0, 4.0), []
    for _ in range(rng.choice((1, 2, 3))):
        found.append(Fault(at, rng.choice(kinds), rng.randrange(12)))
        if rng.random() < 0.4:  # mostly while the ranks meet or move
            found.append(Fault(at + rng.uniform(0.0, 1.5), rng.choice(_FAULTS), rng.randrange(12)))
        at += rng.uniform(0.5, 4.0)
    return tuple(found)


def moves_simulation(seed: int) -> Simulation:
    """Return the job of this seed, on one machine, with drained ranks."""
    rng = random.Random(f"moves {seed}")
    settings = Settings(
        world_size=rng.randint(1, 4),
        spares=rng.randint(1, 2),
        repair_timeout_s=REPAIR_TIMEOUT_S,
        shutdown_timeout_s=3.0,
        join_timeout_s=60.0,
        calm_s=1.0,
        capture_interval=rng.choice((1, 1, 2, 3)),
        hot_spares=rng.random() < 0.3,
    )
    return Simulation(seed, settings, _drains(rng, ("drain rank",)), steps=rng.choice((20, 60, 150)))


def node_moves_simulation(seed: int) -> Simulation:
    """Return the job of this seed, on several nodes, with drained nodes and ranks."""
    rng = random.Random(f"node moves {seed}")
    job = nodes_simulation(seed, ())
    for fault in _drains(rng, ("drain node", "drain node", "drain rank")):
        job.clock.at(fault.at + 2.0, lambda fault=fault: job.inject(fault))
    if rng.random() < 0.3:
        at = rng.uniform(3.0, 10.0)
        job.clock.at(at, lambda: job.inject(Fault(at, "lose node", rng.randrange(4))))
    job.steps = rng.choice((60, 200))
    return job
