"""A job over four hosts, one of them in reserve, loses one, in every way in which hosts are lost."""

STEPS = 30


def test_an_unfailed_job_over_several_hosts_is_that_of_one(fleet, reference):
    job = fleet("--layout", "ddp", "--steps", str(STEPS))
    job.check_repaired(reference("ddp", STEPS), [], [0, 1, 2, 3])


def test_a_host_that_loses_its_power(fleet, reference):
    job = fleet("--layout", "ddp", "--steps", str(STEPS))
    job.wait_state(2, 5)
    lost = job.host_of(2)
    ranks = [rank for rank in range(6) if job.host_of(rank) == lost]
    job.power_off(lost)
    job.check_repaired(reference("ddp", STEPS), ranks, [host for host in range(4) if host != lost])
