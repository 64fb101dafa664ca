"""Scripts that have never heard of deadpool-run, over several hosts: torchrun's restarts, and hosts in reserve."""

import os
import signal

import pytest
from kit.callers import NOBODY, REFUSED, SERVED, caller


@pytest.fixture
def unmanaged(fleet, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # the hosts' own names lead nowhere

    def start(*words, **options):
        return fleet(*words, script="unmanaged.py", options=("--max-restarts", "1"), **options)

    return start


def check_started_again(job, hosts):
    """Every rank has run to its end in the second attempt, and only there."""
    assert job.wait_exit(hosts) == [0] * len(hosts), job.told()
    ends = job.account.of("end")
    assert sorted(e["rank"] for e in ends) == [0, 1, 2, 3]
    assert {(e["restart"], e["total"]) for e in ends} == {(1, 4.0**5)}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_dies_has_the_group_started_again_on_every_host(unmanaged, rank):
    job = unmanaged("--die", str(rank), hosts=2, spares="0")
    check_started_again(job, [0, 1])


@pytest.mark.slow
def test_a_restart_more_than_allowed_ends_it_on_every_host(unmanaged):
    job = unmanaged("--die", "2", "--always", hosts=2, spares="0")
    assert job.wait_exit([0, 1]) == [1, 1], job.told()
    assert {e["restart"] for e in job.account.of("start")} == {0, 1}
    assert not job.account.of("end")


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True])
def test_a_host_in_reserve_takes_the_place_of_one_that_is_lost(unmanaged, silent):
    job = unmanaged("--hold", "3", hosts=3, spares="1")
    job.wait_until(lambda: job.account.of("held"), "rank 3 at its third step")
    lost = job.host_of(3)
    if silent:
        job.net.cut(lost)
    else:
        job.power_off(lost)
    check_started_again(job, [host for host in range(3) if host != lost])


@pytest.mark.slow
def test_the_store_serves_the_jobs_user_on_the_jobs_hosts_only(unmanaged, net):
    job = unmanaged("--hold", "3", hosts=2, spares="0")
    job.wait_until(lambda: job.account.of("held"), "rank 3 at its third step")
    (held,) = job.account.of("held")
    for host, uid, answer in ((2, None, REFUSED), (1, NOBODY, REFUSED), (0, NOBODY, REFUSED), (1, None, SERVED)):
        with caller(held["store"], uid=uid, namespace=net.names[host]) as calls:
            assert calls.stdout.readline() == answer, (host, uid)
    os.kill(held["pid"], signal.SIGKILL)
    check_started_again(job, [0, 1])
    assert "refused a connection to the store from" in job.agents[0].output
