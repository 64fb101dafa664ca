"""Collectives of the script's own threads when a rank is lost: a thread gets no fake result, and the weights are exact."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kit.cluster import Cluster

DIES = {"save": 5, "meter": 4, "pool": 4, "loop": 4}
"""The step in which rank 1 dies, for each way to use threads."""


def digest(job):
    """Return the digest of the weights, with which both ranks ended."""
    assert job.wait_exit() == 0, job.told()
    (found,) = {event["digest"] for event in job.account.of("end")}
    return found


@pytest.fixture(scope="module")
def unfailed(tmp_path_factory):
    """The weights of a run without a loss. They do not depend on the way."""
    home = tmp_path_factory.mktemp("unfailed")
    job = Cluster(home, "--way", "pool", "--folder", str(home), script="own_threads.py", nproc=2, spares=0)
    try:
        return digest(job)
    finally:
        job.close()


@pytest.fixture
def repaired(cluster, tmp_path, unfailed):
    folder = tmp_path / "folder"
    folder.mkdir()

    def run(way, *words):
        job = cluster(
            *("--way", way, "--die", str(DIES[way]), "--folder", str(folder), *words), script="own_threads.py", nproc=2
        )
        assert digest(job) == unfailed
        assert "recovered rank 1" in job.stderr, job.told()
        job.check_nothing_left()
        return job, folder

    return run


def test_a_checkpoint_in_flight_is_lost_and_the_repeated_step_writes_it(repaired):
    job, folder = repaired("save")
    (lost,) = job.account.of("lost")
    assert (lost["rank"], "a peer was lost" in lost["text"]) == (0, True)
    for saved in job.account.of("saved"):
        assert saved["shards"] == ["__0_0.distcp", "__1_0.distcp"], "a checkpoint lacks the shards of a rank"
    state = {"model": torch.nn.Linear(8, 4).state_dict()}
    dcp.load(state, checkpoint_id=folder / "step-5", no_dist=True)


def test_a_script_that_does_not_catch_the_loss_of_a_checkpoint_ends_with_its_text(cluster, tmp_path):
    """Each rank in turn waits for the checkpoint that the loss of the other one has cut."""
    job = cluster(
        "--way", "save", "--die", "5", "--folder", str(tmp_path), "--uncaught", script="own_threads.py", nproc=2
    )
    assert job.wait_exit() == 1, job.told()
    assert "Catch deadpool_run.errors.PeerLostError where the script waits for the thread" in job.stderr, job.told()
    assert not job.account.of("end")
    job.check_nothing_left()


def test_a_thread_of_the_whole_run_gets_no_number_that_is_not_of_both_ranks(repaired):
    job, _ = repaired("meter")
    assert {event["value"][1] for event in job.account.of("sum")} == {2.0}
    assert {event["rank"] for event in job.account.of("lost")} == {0, 1}


def test_threads_of_a_step_are_repeated_with_it(repaired):
    job, _ = repaired("pool")
    assert len(job.account.of("start")) == 3, "the survivor ran its script again"


def test_a_loop_in_a_thread_of_its_own_is_the_step(repaired):
    job, _ = repaired("loop")
    assert len(job.account.of("start")) == 3, "the survivor ran its script again"
