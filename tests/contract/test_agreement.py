"""Comparison of replicas: a difference after a repair stops the job. The message says what differs, where, and since when."""

import re
from pathlib import Path

import pytest
import torch
from kit.cluster import Cluster

REFUSED, DIFFER = 94, 95
SCRIPTS = Path(__file__).parent / "scripts"
LATE = SCRIPTS / "late_difference.py"


def replaced_and_spoilt(cluster, layout, nproc):
    """Lose rank 1 in step 5, before any collective of the step. Otherwise the repeated step's results would be refused."""
    held = ("--hold", "5", "--hold-rank", "1")
    job: Cluster = cluster("--layout", layout, *held, "--corrupt", "replacement", nproc=nproc)
    job.wait_event("held")
    job.look_until(lambda: job.status_page.committed() == 5, "version 5 of every rank")
    job.kill(1)
    return job


def test_replicas_that_differ_after_a_repair_stop_the_job(cluster):
    """One unit in the last place of one weight, on the replaced rank."""
    job = replaced_and_spoilt(cluster, "ddp", nproc=3)
    assert job.wait_exit() == DIFFER, job.told()
    said = " ".join(job.stderr.split())
    found = re.search(r"replicas that were equal before a loss differ after its repair, at version (\d+): model/", said)
    assert found, job.told()
    version = int(found[1])
    assert "on rank 1 (of ranks 0, 1, 2)" in said
    kept = sorted((job.run_dir / "evidence").iterdir())
    assert kept
    for path in kept:
        versions = torch.load(path, weights_only=True)
        assert set(versions) == {f"version {version - 1}", f"version {version}"}
        assert set(versions[f"version {version}"]) == set(versions[f"version {version - 1}"])


def test_a_survivor_that_computes_something_else_in_a_repeated_step_stops_the_job(cluster):
    """A change of one unit in the last place of one weight is noticed before any reduction."""
    job: Cluster = cluster("--layout", "ddp", "--die", "rank=1,step=5,at=collective", "--corrupt", "survivor", nproc=3)
    assert job.wait_exit() == REFUSED, job.told()
    assert "a step that was repeated after a loss computed a different result" in " ".join(job.stderr.split())


def test_shards_are_compared_across_replicas(cluster):
    job = replaced_and_spoilt(cluster, "hsdp", nproc=4)
    assert job.wait_exit() == DIFFER, job.told()
    assert "(of ranks 1, 3)" in " ".join(job.stderr.split())


def test_no_version_that_differs_is_made_durable(cluster, tmp_path):
    """Replicas differ from version 7 on. Until 8 steps after the repair, each version is compared before it is committed."""
    kept = tmp_path / "kept"
    every = ("--durable", str(kept), "--durable-every", "1")
    job: Cluster = cluster("20", "6", str(kept), script=LATE, nproc=2, spares=1, options=every)
    assert job.wait_exit() == DIFFER, job.told()
    assert max(path.name for path in kept.glob("step-*")) == "step-00000006"
    assert "differ after its repair, at version 7:" in " ".join(job.stderr.split()), job.told()


@pytest.mark.parametrize("lost", [(2,), pytest.param((0, 2), id="all ranks, one after the other")])
def test_a_rank_is_no_evidence_until_it_was_compared_after_its_own_repair(lost, cluster):
    """Otherwise two ranks that were not replaced would differ, and the wrong restore be learned as the script's intent."""
    job: Cluster = cluster(*map(str, lost), script=SCRIPTS / "lost_while_compared.py", nproc=3, spares=3)
    assert job.wait_exit() == DIFFER, job.told()
    assert "on rank 1 (of ranks 0, 1, 2)" in " ".join(job.stderr.split())


@pytest.mark.parametrize(("steps", "later"), [(20, 15), pytest.param(19, 17, id="compared after the last step only")])
def test_replicas_that_differ_long_after_a_repair_are_reported(steps, later, cluster):
    """A count in a queue has an effect on the weights only later."""
    job: Cluster = cluster(f"{steps}", f"{later}", script=LATE, nproc=2, spares=1)
    assert job.wait_exit() == 0, job.told()
    said = " ".join(job.stderr.split())
    assert "replicas that were equal before a loss differ at version" in said, job.told()
    assert "(of ranks 0, 1)" in said
