"""Ranks of different hosts share parities: a lost host's ranks are computed from them, in memory of less than a copy each."""

import pytest

STEPS = 30
STEP = ("--least-ms", "100")


@pytest.mark.parametrize("ranks_per_parity", [3, 2])
def test_a_lost_hosts_ranks_are_computed_from_parities(fleet, reference, ranks_per_parity):
    """With 3, the reserve has all parities and takes the ranks. With 2, some rank is computed for another host."""
    options = ("--redundancy", f"xor:{ranks_per_parity}")
    job = fleet("--layout", "fsdp", "--steps", str(STEPS), *STEP, options=options)
    for rank in range(6):
        job.wait_state(rank, 5)
    homes = {rank: job.host_of(rank) for rank in range(6)}
    lost = next(host for host in (2, 1, 3) if host in homes.values())
    job.power_off(lost)
    ranks = [rank for rank in homes if homes[rank] == lost]
    job.check_repaired(reference("fsdp", STEPS), ranks, [host for host in range(4) if host != lost])
