"""`status`, `kill-rank` and the like work on every host of a job."""

import json
import re
import signal
import subprocess
import sys

import pytest

LIMIT_S = 15.0


def deadpool(job, host, *words):
    """Run a command on a host, about the job as that host's agent knows it."""
    folder = job.run_dir if host == 0 else job.run_dir / f"node-h{host}"
    command = [sys.executable, "-m", "deadpool_run", *words, "--run-dir", str(folder)]
    return subprocess.run(
        ["ip", "netns", "exec", job.net.names[host], *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def status(job, host):
    shown = deadpool(job, host, "status", "--json")
    assert shown.returncode in {0, 3}, shown.stderr
    return json.loads(shown.stdout)


@pytest.fixture
def job(fleet):
    started = fleet("--layout", "ddp", "--steps", "100000", "--least-ms", "100", node_timeout_s=1.0)
    for rank in range(6):
        started.wait_state(rank, 5)
    return started


@pytest.mark.slow
def test_every_host_shows_the_whole_job(job):
    leader, other = status(job, 0), status(job, 2)
    assert other["coordinator"] == leader["coordinator"]
    assert {**other["coordinator"], "voters": []} == {"node": "h0", "term": 0, "voters": []}
    assert [node["node"] for node in other["nodes"]] == [node["node"] for node in leader["nodes"]]
    by_name = {node["node"]: node for node in other["nodes"]}
    assert by_name.keys() == {"h0", "h1", "h2", "h3"}
    assert sorted(rank for node in by_name.values() for rank in node["ranks"]) == list(range(6))
    for name, node in by_name.items():
        assert node["address"] == job.net.addresses[int(name[1:])]
        assert (node["silent_ms"] is None) == (name == "h0")
        assert set(node["copies_of"]).isdisjoint(node["ranks"])
        assert node["copies"]["sent_bytes"] > 0 or not node["ranks"]
    assert other["exposed_ms"] is None
    text = deadpool(job, 3, "status", "--once").stdout
    assert "led by h0 (term 0)" in text
    assert re.search(r"^h\d +\S+ +spare ", text, re.MULTILINE)
    assert "6 ranks" in job.agents[0].output.splitlines()[0]


def test_a_rank_is_killed_from_another_host(job):
    """It is one of the leading host, where each sign of life of the replacement's shows what the replacement has: nothing yet."""
    rank = next(rank for rank in range(6) if job.host_of(rank) == 0)
    pids = job.account.pids(rank)
    killed = deadpool(job, 3, "kill-rank", str(rank))
    assert f"(pid {pids[-1]}) was sent SIGKILL" in killed.stdout, killed.stderr
    job.wait_state(rank, 8, pid_not=pids)
    assert "could not be fetched" not in job.agents[0].output
    assert [incident["steps_repeated"] <= 1 for incident in status(job, 3)["incidents"]] == [True]
    refused = deadpool(job, 3, "kill-rank", "6")
    assert "there is no rank 6" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the leader's", "another"])
def test_an_agent_is_killed_from_another_host(job, whose):
    """Its node is lost, and the leader after that knows that a user did it."""
    homes = {rank: job.host_of(rank) for rank in range(6)}
    host = 0 if whose == "the leader's" else next(host for host in (2, 1, 3) if host in homes.values())
    ranks = [rank for rank, home in homes.items() if home == host]
    pids = {rank: job.account.pids(rank) for rank in ranks}
    job.wait_voters(3)
    asked = next(each for each in (3, 1) if each != host)
    killed = deadpool(job, asked, "kill-rank", "--agent", "--node", f"h{host}")
    assert killed.stdout == f"node h{host} with ranks {', '.join(map(str, ranks))}: its agent was sent SIGKILL\n"
    for rank in ranks:
        job.wait_state(rank, 8, pid_not=pids[rank])
    (incident,) = status(job, asked)["incidents"]
    causes = {(loss["rank"], loss["cause"], loss["injected"]) for loss in incident["losses"]}
    assert causes == {(rank, f"was lost with node h{host}", True) for rank in ranks}
    assert job.agents[host].process.wait(LIMIT_S) == -signal.SIGKILL


@pytest.mark.slow
def test_a_loss_of_a_host_exposes_the_others_until_their_copies_are_made_again(job):
    lost = next(host for host in (2, 1, 3) if host in {job.host_of(rank) for rank in range(6)})
    job.power_off(lost)
    others = [host for host in (1, 2, 3) if host != lost]
    job.wait_output(0, "every rank has all its copies again")
    incident = status(job, others[0])["incidents"][-1]
    assert 0 < incident["exposed_s"] < LIMIT_S
    assert status(job, others[1])["exposed_ms"] is None


@pytest.mark.slow
def test_whoever_leads_next_answers_for_all(job):
    led = [rank for rank in range(6) if job.host_of(rank) == 0]
    pids = {rank: job.account.pids(rank) for rank in led}
    job.power_off(0)
    for rank in led:
        job.wait_state(rank, 6, pid_not=pids[rank])
    leads = next(host for host in (1, 2, 3) if "this node leads the job" in job.agents[host].output)
    for host in (1, 2, 3):
        assert status(job, host)["coordinator"]["node"] == f"h{leads}"
