"""Lines for programs, from the agents of one job."""

import json
import os
import socket
import subprocess
import sys

from kit.processes import MARK, kill_marked, wait_gone

BOUND_S = 60


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_every_machine_of_a_job_writes_the_name_of_its_run(tmp_path):
    """Each has chosen a name, and the second one takes that of the job when it joins."""
    options = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--log-format", "json")
    environment = {**os.environ, MARK: tmp_path.name, "DEADPOOL_TOKEN": "of-this-test-only-0123456789abcdef0123456789"}
    agents = []
    for name in ("a", "b"):
        machine = ("--node-name", name, "--run-dir", str(tmp_path / name))
        command = [sys.executable, "-m", "deadpool_run", "--no-config", *options, *machine, "--no-python", "/bin/true"]
        with (tmp_path / f"{name}.log").open("wb") as log:
            agents.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment))
    try:
        codes = [agent.wait(BOUND_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        kill_marked(tmp_path.name)
        wait_gone(tmp_path.name, 10)
    told = [[json.loads(line) for line in (tmp_path / f"{name}.log").open()] for name in ("a", "b")]
    assert codes == [0, 0], told
    (run,) = (line["run_id"] for lines in told for line in lines if line["event"] == "run_started")
    (joined,) = (
        lines[at:] for lines in told for at, line in enumerate(lines) if line["message"].startswith(f"joined run {run}")
    )
    assert {line["run_id"] for line in joined} == {run}
