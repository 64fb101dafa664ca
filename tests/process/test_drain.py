"""`deadpool-run drain` of a rank: it moves to a spare at a step's end, and no step begins twice on any rank."""

import subprocess
import sys
from collections import Counter

import pytest
from kit.choice import often

from deadpool_run.errors import RequestRefusedError

STEPS = 30
HELD = 10


def check_moved(job, reference, ranks):
    """The weights are those of an unfailed run, every step began once on each rank, and the journal has one planned incident."""
    job.check_repaired(reference, ranks)
    begun = Counter((e["rank"], e["version"]) for e in job.account.of("state"))
    assert set(begun.values()) == {1}, [step for step, count in begun.items() if count > 1]
    (incident,) = job.incidents()
    assert [(loss["rank"], loss["planned"]) for loss in incident["losses"]] == [(rank, True) for rank in ranks]
    assert incident["steps_repeated"] == 0
    return incident


@pytest.mark.parametrize("layout", often(("ddp-full", "fsdp", "pp"), {"ddp-full"}))
def test_a_drained_rank_moves_at_a_step_s_end(cluster, reference, layout):
    job = cluster("--layout", layout, "--steps", str(STEPS), "--hold", str(HELD))
    job.wait_event("held")  # within a step: the others wait in its collectives, or have begun it
    for wrong, why in (("7", "there is no rank 7"), ("elsewhere", "there is no node elsewhere")):
        refused = job.command_line("drain", wrong)
        assert f"{wrong} is not drained: {why}" in refused.stderr
        assert refused.stderr.endswith("\n  `deadpool-run status` shows ranks, nodes and spares\n")
        assert refused.returncode == RequestRefusedError.exit_code
    words = ("drain", "1", "--run-dir", str(job.run_dir))
    with subprocess.Popen([sys.executable, "-m", "deadpool_run", *words], stdout=subprocess.PIPE, text=True) as drain:
        at = job.wait_status(lambda status: (status["draining"] or {}).get("at"), "version to stop at")
        second = job.command_line("drain", "2")
        assert "rank 2 is not drained: another drain is under way" in second.stderr
        job.release()
        assert "rank 1 is drained: rank 1: worker " in drain.communicate()[0]
    assert drain.returncode == 0
    incident = check_moved(job, reference(layout, STEPS), [1])
    assert incident["resumed"] == at > HELD
    assert "moved rank 1 to spare worker" in job.stderr


def test_a_rank_that_is_lost_while_others_wait_for_it_is_repaired(cluster, reference):
    job = cluster("--layout", "ddp-full", "--steps", str(STEPS), "--hold", str(HELD))
    job.wait_event("held")
    assert job.command_line("drain", "1", "--no-wait").returncode == 0
    job.wait_status(lambda status: (status["draining"] or {}).get("at"), "version to stop at")
    job.kill(0)
    job.check_repaired(reference("ddp-full", STEPS), [0])
    assert "rank 1 is not drained" in job.stderr
