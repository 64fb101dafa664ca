"""`deadpool-run drain` of a host: its ranks move to the host in reserve, no step is repeated, and its agent leaves."""

import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kit.choice import often

from deadpool_run.wire.peers import DRAINED

HELD = 8
COMPARED = 40
STEP = ("--least-ms", "50")


def command(*words):
    return [sys.executable, "-m", "deadpool_run", "drain", *words]


def lines_of(page, begin):
    """Return the lines for bash in a page of the documentation that begin so."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    (lines,) = (block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if block.startswith(begin))
    return lines


def started(fleet, *options, lines=""):
    """Start a job that does not end by itself; return it, and a host with ranks other than the first."""
    job = fleet("--layout", "ddp", "--steps", "100000", "--hold", str(HELD), *STEP, options=options, lines=lines)
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


def check_left_alone(job, host):
    """The host's lines end with its agent's exit code, and the others train."""
    release(job)
    assert job.wait_exit([host]) == [0], job.told()
    assert DRAINED in job.agents[host].output
    job.wait_output(0, f"node h{host} has left the job")
    job.agents[0].process.send_signal(signal.SIGTERM)
    job.wait_exit([other for other in range(4) if other != host])


def test_the_lines_for_a_job_array_drain_the_task_that_gets_the_signal(fleet):
    job, host = started(fleet, lines=lines_of("slurm.md", "#SBATCH --array=0-9 --nodes=1 --requeue --signal"))
    job.agents[host].process.send_signal(signal.SIGUSR1)  # to the shell, as Slurm does with `B:`
    check_left_alone(job, host)


METADATA = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.answer(200, b"secret" if self.path == "/latest/api/token" else b"")

    def do_GET(self):
        known = self.headers["X-aws-ec2-metadata-token"] == "secret"
        noticed = os.path.exists(sys.argv[1]) and self.path == "/latest/meta-data/spot/instance-action"
        self.answer(401 if not known else 200 if noticed else 404, b"{}")

    def answer(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

server = HTTPServer(("169.254.169.254", 80), Metadata)
print("listens", flush=True)
server.serve_forever()
"""
"""The metadata service of a virtual machine of EC2, which has a notice once the file is there."""


@pytest.mark.slow
def test_the_lines_for_a_spot_instance_drain_the_machine_that_gets_a_notice(fleet, tmp_path):
    job, host = started(fleet, lines=lines_of("several-machines.md", "notice() {"))
    inside = ("ip", "netns", "exec", job.net.names[host])
    subprocess.run([*inside, "ip", "addr", "add", "169.254.169.254/32", "dev", "lo"], check=True)
    server = [*inside, sys.executable, "-c", METADATA, str(tmp_path / "notice")]
    with subprocess.Popen(server, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as metadata:
        try:
            assert metadata.stdout.readline() == "listens\n"
            assert "is not drained" not in job.agents[host].output
            (tmp_path / "notice").touch()
            check_left_alone(job, host)
        finally:
            metadata.terminate()
            asked = metadata.communicate()[1]
    assert "GET /latest/meta-data/spot/instance-action" in asked
    assert " 401 " not in asked
