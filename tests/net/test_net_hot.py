"""A machine in reserve whose spares have rehearsed ahead of need."""

import pytest

STEPS = 25
LAYOUT = ("--layout", "ddp", "--steps", str(STEPS), "--hold", "6", "--least-ms", "100")


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_the_ranks_of_a_lost_machine_go_to_spares_that_have_rehearsed_them(fleet, reference, known):
    job = fleet(*LAYOUT, options=("--spare-mode", "hot"))

    def prepared():
        spares = (job.status() or {"spares": []})["spares"]
        return sorted(
            spare["prepared"] for spare in spares if spare["phase"] == "ready" and spare["prepared"] is not None
        )

    for rank in range(6):
        job.wait_state(rank, 6)
    job.look_until(lambda: len(prepared()) == 2, "spares that have rehearsed")
    homes = {rank: job.host_of(rank) for rank in range(6)}
    rehearsed = {homes[rank] for rank in prepared()}
    assert len(rehearsed) == 1, "they are for the ranks of one machine"
    lost = next(host for host in {*homes.values()} if (host in rehearsed) == known)
    ranks = [rank for rank in homes if homes[rank] == lost]
    spares = {event["pid"] for event in job.account.of("prepare")}
    job.release()
    for rank in range(6):
        job.wait_state(rank, 9)
    job.power_off(lost)
    job.check_repaired(reference("ddp", STEPS), ranks, [host for host in range(4) if host != lost])
    assert {job.account.pids(rank)[-1] for rank in ranks} == spares
    set_up = [event["pid"] for event in job.account.of("ready") if event["pid"] in spares]
    assert len(set_up) == (2 if known else 4), "who has rehearsed the rank does not set up again"
