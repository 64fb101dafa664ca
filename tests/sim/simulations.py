"""Jobs drawn from a seed: their settings, and their faults by kind."""

import dataclasses
import random

from simulator import AT_ONCE, REPAIR_TIMEOUT_S, Fault, Simulation

from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings

KINDS = (
    *(
        "kill rank",
        "kill rank",
        "kill rank",
        "kill rank",
        "inject",
        "freeze rank",
        "raise",
        "kill parked",
        "freeze parked",
    ),
    *("suspect", "abort", "attach", "start", "wedge rank", "bad network"),
)
ABORT_KINDS = ("abort", "abort", "abort", "endless", "endless", "stuck", "run")
"""Faults of jobs whose steps are aborted."""
REFUSAL_KINDS = ("refuse", "refuse", "kill rank", "kill rank", "raise", "suspect", "abort", "inject")
"""Faults of jobs in which the library refuses to continue."""
NODE_KINDS = (
    "lose node",
    "lose node",
    "lose node",
    "lose nodes",
    "kill rank",
    "kill rank",
    "freeze rank",
    "suspect",
    "wedge rank",
)
"""Faults of a job on several nodes."""


def planned(rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    """Return one or more faults, often close together."""
    if not kinds:
        return ()
    at, found = rng.choice((rng.uniform(0.0, 1.5), rng.uniform(1.0, 4.0), rng.uniform(1.0, 4.0))), []
    for _ in range(rng.choice((1, 2, 3, 4, 8))):
        found.append(Fault(at, rng.choice(kinds), rng.randrange(12)))
        at += rng.uniform(0.0, 1.0) if rng.random() < 0.6 else rng.uniform(0.0, 8.0)
    if rng.random() < 0.1:
        found.append(Fault(rng.uniform(0.0, at), "stop"))
    return tuple(found)


def settings_on_nodes(seed: int, rng: random.Random) -> Settings:
    """Return the settings of the job of this seed, on several nodes."""
    nodes = rng.randint(2, 4)
    ranks, spare_nodes, spares = nodes * rng.randint(1, 2), rng.randint(0, 2), rng.choice((0, 0, 2))
    replicas = rng.choice((1, 1, 2))
    return Settings(
        world_size=ranks,
        nodes=nodes,
        spare_nodes=spare_nodes,
        spares=spares,
        replicas=replicas,
        ranks_per_parity=random.Random(f"parity {seed}").choice((1, 2, 3)) if replicas == 1 else 1,
        shutdown_timeout_s=3.0,
        hot_spares=random.Random(f"hot {seed}").random() < 0.3,  # its own generator: other draws do not change
    )


def nodes_simulation(seed: int, kinds: tuple[str, ...] = NODE_KINDS, *, durable: bool = False) -> Simulation:
    """Return the job of this seed, on several nodes."""
    rng = random.Random(f"nodes {seed}")
    settings = dataclasses.replace(
        settings_on_nodes(seed, rng),
        repair_timeout_s=REPAIR_TIMEOUT_S,
        join_timeout_s=60.0,
        calm_s=1.0,
        capture_interval=rng.choice((1, 1, 2)),
        durable=durable,
    )
    job = Simulation(seed, settings, planned(rng, kinds), steps=rng.choice((20, 60)))
    job.storage.slowest_s = 1.5 if AT_ONCE in kinds else 0.15
    return job


def memory_simulation(seed: int) -> Simulation:
    """Return the job of this seed, on several nodes. Some nodes have memory for few copies, or for none."""
    rng = random.Random(f"memory {seed}")
    job = nodes_simulation(seed)
    names = [f"n{at}" for at in range(job.settings.nodes + job.settings.spare_nodes)]
    job.storage.rooms = {name: rng.randint(0, 1) for name in names if rng.random() < 0.4}

    def on_refused(node: str, rank: int, taken: bool) -> None:
        job.refusals += not taken
        job.tell((ev.RefusedCopyTaken if taken else ev.CopyRefused)(node, rank))

    job.storage.on_refused = on_refused
    return job


def abort_simulation(seed: int) -> Simulation:
    """Return the job of this seed. Its steps often cannot be aborted when a rank is lost."""
    rng = random.Random(f"abort {seed}")
    at, faults = rng.uniform(1.0, 4.0), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        faults += [Fault(at, rng.choice(ABORT_KINDS), rng.randrange(12)) for _ in range(rng.randint(1, 3))]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            kind = rng.choice(("kill rank", "kill rank", "kill rank", "freeze rank", "suspect", "inject", "attach"))
            faults.append(Fault(at + rng.uniform(0.0, 0.5), kind, rng.randrange(12)))
            at += rng.choice((0.0, rng.uniform(0.0, 1.0)))
        at += rng.uniform(0.5, 8.0)
    settings = Settings(
        world_size=rng.randint(2, 4),
        spares=rng.randint(0, 2),
        abort_timeout_s=rng.choice((0.5, 2.0)),
        repair_timeout_s=REPAIR_TIMEOUT_S,
        shutdown_timeout_s=3.0,
        calm_s=1.0,
        capture_interval=rng.choice((1, 1, 2)),
        hot_spares=rng.random() < 0.3,
    )
    return Simulation(seed, settings, tuple(faults), steps=rng.choice((60, 150)))


def simulation(seed: int, kinds: tuple[str, ...] = KINDS) -> Simulation:
    """Return the job of this seed, with faults of these kinds."""
    rng = random.Random(seed)
    settings = Settings(
        world_size=rng.randint(1, 4),
        spares=rng.randint(0, 2),
        repair_timeout_s=REPAIR_TIMEOUT_S,
        shutdown_timeout_s=3.0,
        calm_s=1.0,
        capture_interval=rng.choice((1, 1, 2, 3)),
        hot_spares=random.Random(f"hot {seed}").random() < 0.3,  # its own generator: other draws do not change
    )
    return Simulation(seed, settings, planned(rng, kinds), steps=rng.choice((3, 20, 60)))
