"""Who ends a job whose batch host may be dead."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

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
