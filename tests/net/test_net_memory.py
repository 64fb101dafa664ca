"""A job over hosts of which one has no memory for copies."""

import pytest

STEPS = 20


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("net", [3], indirect=True)
def test_copies_that_one_host_refuses_are_on_another_when_a_host_is_lost(fleet, reference):
    """The spare host has no memory: without another choice one rank of each host had no copy, and the job could not go on."""
    places = {host: ("--node-rank", str(host)) for host in range(3)}
    job = fleet(
        *("--layout", "fsdp", "--steps", str(STEPS), "--least-ms", "300"),
        hosts=3,
        host_options={**places, 2: (*places[2], "--snapshot-memory", "1KiB")},
    )

    def is_committed():
        status = job.status()
        return status is not None and status["phase"] == "running" and (status["committed"] or 0) > 1

    job.look_until(is_committed, "version that is safe")
    assert {node["node"]: node["copies_of"] for node in job.status()["nodes"]} == {"h0": [2, 3], "h1": [0, 1], "h2": []}
    assert "go to h" in job.agents[0].output
    job.power_off(1)
    # The spare host, which has the ranks of the lost one now, takes neither snapshots nor copies. The job ends all the same.
    job.check_repaired(reference("fsdp", STEPS, ranks=4), [2, 3], [0, 2])
