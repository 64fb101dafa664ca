"""The end of a Slurm job whose batch host may be dead."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.agent.rendezvous.leader_file import LeaderFile

ENDER = Path(__file__).parent / "scripts" / "ender.py"
SCRIPT = """#!/bin/bash
#SBATCH --no-kill --nodes=3
srun --no-kill --kill-on-bad-exit=0 --wait=0 python {ender} {living}
echo "srun ended: $?"
"""


def told(lab):
    path = lab.work / "told"
    return path.read_text() if path.exists() else ""


def start(lab, living="all"):
    job = lab.sbatch(SCRIPT.format(ender=ENDER, living=living))
    lab.wait_until(lambda: told(lab).count("up") == 3, "three agents")
    return job


def end(lab):
    """Have the agents come to their end. Not by scancel, which is a while in trouble after the loss of a node."""
    for pid in re.findall("up as ([0-9]+)", told(lab)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGUSR1)


def test_while_all_live_srun_ends_by_itself(lab):
    job = start(lab)
    end(lab)
    assert job.wait() == "COMPLETED"
    assert "cancelled False" in told(lab)
    assert job.output() == "srun ended: 0\n"


def test_without_the_agent_beside_srun_srun_is_asked(lab):
    job = start(lab, living="others")
    end(lab)
    assert job.wait() == "COMPLETED"
    assert "cancelled False" in told(lab)
    assert job.output().endswith("srun ended: 0\n")


@pytest.mark.parametrize("noticed", [True, False])
def test_when_the_batch_host_is_dead_the_last_agent_ends_the_job(lab, noticed):
    job = start(lab, living="others")
    lab.kill_node("n1")
    if noticed:
        lab.mark_down("n1")
    end(lab)
    # COMPLETING lasts until Slurm has given the dead node up.
    assert job.wait("CANCELLED", "COMPLETING")
    assert "gone" in told(lab)


def led_by(lab, node, *, ended=False):
    """Write what whoever leads a run writes into its directory; return that directory."""
    base = lab.work / "run"
    (base / f"node-{node}").mkdir(parents=True)
    (base / f"node-{node}" / "run.json").write_text(json.dumps({"ended": "2026-01-01" if ended else None}))
    leader_file.write(base, LeaderFile(1, node, node, "127.0.0.1", 1, str(base / f"node-{node}")))
    return base


@pytest.mark.parametrize("leader", ["the batch host", "one that has ended", "one that Slurm has lost"])
def test_who_gives_up_ends_the_job_if_nobody_else_can_go_on(lab, leader):
    node = "n1" if leader == "the batch host" else "n2"
    job = start(lab, living=led_by(lab, node, ended=leader == "one that has ended"))
    if leader == "one that Slurm has lost":
        lab.lose_node("n2")
    lab.kill_node("n1")
    end(lab)
    assert job.wait("CANCELLED", "COMPLETING")
    assert "gone" in told(lab)


@pytest.mark.parametrize(
    ("leader", "why"),
    [
        ("n2", "node n2 may be training"),
        ("n2~2", "node n2~2 may be training"),
        ("mine", "node mine may be training"),
        ("nobody knows", "cannot be read here"),
    ],
)
def test_who_gives_up_leaves_the_job_to_those_who_may_go_on(lab, leader, why):
    job = start(lab, living=lab.work / "run" if leader == "nobody knows" else led_by(lab, leader))
    lab.kill_node("n1")
    end(lab)
    lab.wait_until(lambda: "cancelled False" in told(lab), "decision of the last agent")
    assert f"Slurm job {job.number} has lost its batch script, and is not cancelled" in told(lab)
    assert why in told(lab)
    assert job.state == "RUNNING"


def test_who_gives_up_while_srun_waits_says_nothing(lab):
    job = start(lab, living=led_by(lab, "n2"))
    end(lab)
    assert job.wait() == "COMPLETED"
    assert "cancelled False" in told(lab)
    assert "not cancelled" not in told(lab)
