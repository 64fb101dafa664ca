"""An exception on several hosts: a bug stops the job everywhere, a fault is repaired."""

import pytest

RAISES = "a tensor that the script should have checked"


def test_the_same_exception_on_two_hosts_stops_the_job(fleet):
    dies = [word for rank in range(4) for word in ("--die", f"rank={rank},step=5,at=optimizer,how=raise")]
    job = fleet("--steps", "12", *dies, hosts=2, spares="1w")
    assert job.wait_exit([0, 1]) == [1, 1], job.told()
    leader = job.agents[0].output
    assert "a bug in the script" in leader
    assert leader.count("Traceback (most recent call last)") >= 1, "that of its own rank, which is also the other's"
    assert leader.count(RAISES) >= 3
    assert {len(job.account.pids(rank)) for rank in range(4)} == {1}


@pytest.mark.slow
def test_an_exception_on_one_host_alone_is_a_fault(fleet, reference):
    job = fleet(
        "--steps", "12", "--least-ms", "100", "--die", "rank=3,step=6,at=forward,how=raise-once", hosts=2, spares="1w"
    )
    job.check_repaired(reference("ddp", 12, 4), [3], [0, 1])
