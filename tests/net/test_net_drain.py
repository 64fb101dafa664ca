"""`deadpool-run drain` of a host: its ranks move to the host in reserve, no step is repeated, and its agent leaves."""

import signal
import subprocess
import sys
from collections import Counter

import pytest
from kit.choice import often

from deadpool_run.wire.peers import DRAINED

HELD = 8
COMPARED = 40
STEP = ("--least-ms", "50")


def command(*words):
    return [sys.executable, "-m", "deadpool_run", "drain", *words]


def started(fleet, *options):
    """Start a job that does not end by itself; return it, and a host with ranks other than the first."""
    job = fleet("--layout", "ddp", "--steps", "100000", "--hold", str(HELD), *STEP, options=options)
    job.wait_until(lambda: job.account.of("held"), "rank 0 within a step")
    job.wait_whole(4, 2)
    return job, next(other for other in (2, 1, 3) if ranks_on(job, other))


def drained(fleet, host, *options):
    """Start a job, and drain a host with ranks; return the job and these ranks."""
    job, other = started(fleet, *options)
    host = other if host is None else host
    ranks = ranks_on(job, host)
    asked = subprocess.run(
        command(f"h{host}", "--no-wait", "--run-dir", str(job.run_dir)), capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    release(job)
    return job, host, ranks


def release(job):
    job.look_until(lambda: ((job.status() or {}).get("draining") or {}).get("at"), "version to stop at")
    job.release()


def ranks_on(job, host):
    return [rank for rank in range(6) if job.host_of(rank) == host]


def check(job, reference, ranks):
    """The moved ranks train, with the digests of an unfailed run."""
    for rank in range(6):
        job.wait_state(rank, COMPARED)
    told = [e for e in job.account.of("state") if e["version"] <= COMPARED]
    wrong = [(e["rank"], e["version"]) for e in told if reference.get((e["rank"], e["version"])) != e["digest"]]
    assert not wrong
    job.account.check_ranks(ranks, 6)
    return Counter((e["rank"], e["version"]) for e in told)


@pytest.mark.parametrize("redundancy", often(["copies", "xor:3"], ["copies"]))
def test_a_drained_host_leaves_the_job_without_a_repeated_step(fleet, reference, redundancy):
    unfailed = reference("ddp", COMPARED)
    job, host, ranks = drained(fleet, None, "--redundancy", redundancy)
    assert job.wait_exit([host]) == [0], job.told()
    assert DRAINED in job.agents[host].output
    begun = check(job, unfailed, ranks)
    assert set(begun.values()) == {1}, [step for step, count in begun.items() if count > 1]
    incidents = [effect["incident"] for effect in job.effects() if effect["type"] == "ReportIncident"]
    assert [(i["steps_repeated"], {loss["planned"] for loss in i["losses"]}) for i in incidents] == [(0, {True})]
    job.wait_output(0, f"node h{host} has left the job")
    job.agents[0].process.send_signal(signal.SIGTERM)
    job.wait_exit([other for other in range(4) if other != host])


@pytest.mark.slow
def test_a_drained_host_that_leads_leaves_the_lead_too(fleet, reference):
    unfailed = reference("ddp", COMPARED)
    job, host, ranks = drained(fleet, 0)
    assert job.wait_exit([host]) == [0], job.told()
    assert DRAINED in job.agents[host].output
    check(job, unfailed, ranks)
    others = (1, 2, 3)
    job.look_until(lambda: any("this node leads the job now" in job.agents[o].output for o in others), "another leader")
    job.agents[1].process.send_signal(signal.SIGTERM)
    job.wait_exit(others)


def test_a_host_drains_itself(fleet):
    job, host = started(fleet)
    words = ("--here", "--run-dir", str(job.run_dir / f"node-h{host}"))
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True) as drain:
        release(job)
        assert drain.communicate()[0] == f"node h{host} is drained: its agent has ended\n"
    assert drain.returncode == 0
    assert job.agents[host].process.poll() == 0, "a preStop hook that ends earlier is followed by SIGTERM"
    assert DRAINED in job.agents[host].output
    job.agents[0].process.send_signal(signal.SIGTERM)
    job.wait_exit([other for other in range(4) if other != host])
