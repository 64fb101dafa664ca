"""Hosts are broken one after another, in any way and at any moment, and come back: nothing is ever wrong."""

import random
import secrets
import signal

import pytest

FAULTS = 10
HOSTS = range(4)
ENDED = "this node ends its workers"
STEPS = 120 * FAULTS
"""The job must not end before the last fault, however slow this machine is."""
ALL_STEPS_S = 400.0
"""If all faults come early, most of the steps are still to be done after them."""
LOST = ("power", "agent", "link", "reject", "freeze", "pause")
UNHARMED = ("reset", "pause of all")


def wait_fenced(job, host, before):
    """Wait until the host's agent has ended its workers once more than before."""
    job.look_until(lambda: job.agents[host].output.count(ENDED) > before, f"fence of host {host}")


def shatter(job, net, host, how):
    """Break a host, so that it loses its ranks."""
    if how == "power":
        job.power_off(host)
    elif how == "agent":
        job.agents[host].process.kill()
    elif how == "link":
        net.cut(host)
    elif how == "reject":
        net.reject(host)
    elif how == "freeze":
        job.agents[host].everything(signal.SIGSTOP)
    else:
        job.pause([host], 1.5)


def bring_back(job, net, host, how, ended):
    """Undo that."""
    if how in {"power", "agent"}:
        job.restart(host)
    elif how == "freeze":
        job.agents[host].everything(signal.SIGCONT)
    else:
        wait_fenced(job, host, ended)
    if how == "link":
        net.mend(host)
    elif how == "reject":
        net.reject(host, undo=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("redundancy", [["copies"], ["xor:2", "xor:3"]], ids=["copies", "parities"])
def test_hosts_that_are_broken_one_after_another_and_come_back(fleet, net, reference, redundancy):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    options = ("--redundancy", choose.choice(redundancy))
    print(*options)
    job = fleet("--layout", "ddp", "--steps", str(STEPS), "--least-ms", "100", options=options)
    lost = []
    for rank in range(6):
        job.wait_state(rank, 3)
    for fault in range(FAULTS):
        job.wait_whole(4, 2)
        job.wait_voters(3)
        homes = {rank: job.host_of(rank) for rank in range(6)}
        host, how = choose.choice(HOSTS), choose.choice([*LOST, *UNHARMED, "rank"])
        ranks = [rank for rank, home in homes.items() if home == host] if how in LOST else []
        ended = job.agents[host].output.count(ENDED)
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
            shatter(job, net, host, how)
        for rank in ranks:
            job.wait_until(
                lambda rank=rank, known=known: len(job.account.pids(rank)) > known[rank], f"a holder of rank {rank}"
            )
        if how in LOST:
            bring_back(job, net, host, how, ended)
        lost += ranks
    job.wait_whole(4, 2)
    job.check_repaired(reference("ddp", STEPS, 6, steps=STEPS), lost, list(HOSTS), ALL_STEPS_S)
