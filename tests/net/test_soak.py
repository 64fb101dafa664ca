"""Host after host is lost, in any way and at any moment, and comes back: nothing is ever wrong."""

import random
import signal

import pytest

LOSSES = 8
ENDED = "this node's workers are ended"
STEPS = 120 * LOSSES
"""The job must not end before the last loss, however slow this machine is."""
ALL_STEPS_S = 400.0
"""If all losses come early, most of the steps are still to be done after them."""


def wait_fenced(job, host, before):
    """Wait until the host's agent has ended its workers once more than before."""
    job.look_until(lambda: job.agents[host].output.count(ENDED) > before, f"fence of host {host}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hosts_that_are_lost_one_after_another_and_come_back(fleet, net, reference, seed):
    choose = random.Random(seed)
    job = fleet("--layout", "ddp", "--steps", str(STEPS), "--least-ms", "100")
    lost = []
    for rank in range(6):
        job.wait_state(rank, 3)
    for number in range(LOSSES):
        job.wait_whole(4, 2)
        homes = {rank: job.host_of(rank) for rank in range(6)}
        host, how = choose.randrange(4), choose.choice(["power", "power", "link", "freeze", "pause"])
        ranks = [rank for rank, home in homes.items() if home == host]
        ended = job.agents[host].output.count(ENDED)
        before = {rank: len(job.account.pids(rank)) for rank in ranks}
        print(f"loss {number}: host {host} by {how}, with ranks {ranks}")
        if how == "power":
            job.power_off(host)
        elif how == "link":
            net.cut(host)
        elif how == "freeze":
            job.agents[host].everything(signal.SIGSTOP)
        else:
            job.pause([host], 1.5)
            wait_fenced(job, host, ended)
        for rank in ranks:
            job.wait_until(
                lambda rank=rank, known=before[rank]: len(job.account.pids(rank)) > known, f"a holder of rank {rank}"
            )
        lost += ranks
        if how == "power":
            job.restart(host)
        elif how == "link":
            wait_fenced(job, host, ended)
            net.mend(host)
        elif how == "freeze":
            job.agents[host].everything(signal.SIGCONT)
    job.wait_whole(4, 2)
    job.check_repaired(reference("ddp", STEPS, 6, steps=STEPS), lost, [0, 1, 2, 3], ALL_STEPS_S)
