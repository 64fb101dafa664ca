"""Hosts are broken one after another, in any way and at any moment, and come back: nothing is ever wrong."""

import random
import secrets

import pytest
from kit.breaking import LOST, Breakage

HOSTS = range(4)
STEPS_PER_FAULT = 120
"""The job must not end before the last fault, however slow this machine is."""
S_PER_FAULT = 40.0
"""If all faults come early, most of the steps are still to be done after them."""
UNHARMED = ("reset", "pause of all")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("redundancy", "faults"),
    [(["copies"], 25), (["xor:2", "xor:3"], 10)],  # the first takes ten minutes
    ids=["copies", "parities"],
)
def test_hosts_that_are_broken_one_after_another_and_come_back(fleet, net, reference, redundancy, faults):
    steps = STEPS_PER_FAULT * faults
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    options = ("--redundancy", choose.choice(redundancy))
    print(*options)
    job = fleet("--layout", "ddp", "--steps", str(steps), "--least-ms", "100", options=options)
    lost = []
    for rank in range(6):
        job.wait_state(rank, 3)
    for fault in range(faults):
        job.wait_whole(4, 2)
        job.wait_voters(3)
        homes = {rank: job.host_of(rank) for rank in range(6)}
        host, how = choose.choice(HOSTS), choose.choice([*LOST, *UNHARMED, "rank"])
        ranks = [rank for rank, home in homes.items() if home == host] if how in LOST else []
        known = {rank: len(job.account.pids(rank)) for rank in homes}
        if how == "rank":
            ranks = [choose.choice(list(homes))]
            print(f"fault {fault}: rank {ranks[0]} is killed")
            job.kill(ranks[0])
        else:
            print(f"fault {fault}: {how} of host {host}, with ranks {ranks}")
        if how == "reset":
            job.reset_connections(host)
        elif how == "pause of all":
            job.pause(HOSTS, 2.0)
        elif how in LOST:
            broken = Breakage(job, net, host, how)
        for rank in ranks:
            job.wait_until(
                lambda rank=rank, known=known: len(job.account.pids(rank)) > known[rank], f"a holder of rank {rank}"
            )
        if how in LOST:
            broken.undo()
        lost += ranks
    job.wait_whole(4, 2)
    job.check_repaired(reference("ddp", steps, 6, steps=steps), lost, list(HOSTS), S_PER_FAULT * faults)
