"""Spares that have rehearsed the script ahead of need."""

import os
import signal

import pytest
from kit.cluster import SCRIPTS

STEPS = 25
HOT = ("--spare-mode", "hot")


def prepared(status):
    """Return the ranks that ready spares have rehearsed."""
    return sorted(
        spare["prepared"] for spare in status["spares"] if spare["phase"] == "ready" and spare["prepared"] is not None
    )


def held(cluster, *words, layout="ddp-full", spares=1, **options):
    """Start a job and hold it in its sixth step until every spare has rehearsed."""
    job = cluster(
        "--layout", layout, "--steps", str(STEPS), "--hold", "6", *words, spares=spares, options=HOT, **options
    )
    job.wait_event("held")
    job.wait_status(lambda status: len(prepared(status)) == spares, "hot spares")
    return job


@pytest.mark.parametrize(
    "layout",
    [
        "ddp-full",
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("tp", marks=pytest.mark.slow),
        pytest.param("pp", marks=pytest.mark.slow),
    ],
)
def test_a_spare_goes_on_as_the_rank_that_it_has_rehearsed(cluster, reference, layout):
    job = held(cluster, layout=layout)
    (rank,) = prepared(job.status())
    job.release()
    job.wait_state(rank, 9)
    job.kill(rank)
    job.check_repaired(reference(layout, STEPS), [rank])
    (incident,) = job.incidents()
    assert incident["losses"][0]["from_spare"]
    spare = job.account.pids(rank)[1]
    assert len([event for event in job.account.of("prepare") if event["pid"] == spare]) == 1
    assert len([event for event in job.account.of("start") if event["pid"] == spare]) == 1, "it did not rehearse again"


def on_five_gpus(python, _m, _deadpool_run, *words):
    return (python, str(SCRIPTS / "with_gpus.py"), *words)


@pytest.mark.slow
def test_a_spare_rehearses_on_a_gpu_without_a_rank_and_keeps_it(cluster, reference):
    job = held(cluster, within=on_five_gpus)
    (rank,) = prepared(job.status())
    (rehearsed,) = job.account.of("prepare")
    assert rehearsed["local_rank"] == 4
    job.release()
    job.wait_state(rank, 9)
    job.kill(rank)
    job.check_repaired(reference("ddp-full", STEPS), [rank])
    places = {event["local_rank"] for event in job.account.of("state", rank=rank) if event["pid"] == rehearsed["pid"]}
    assert places == {4}
    assert {event["local_rank"] for event in job.account.of("prepare")[1:]} <= {rank}, "the lost rank's GPU is free now"


@pytest.mark.slow
def test_a_spare_that_has_rehearsed_another_rank_rehearses_again(cluster, reference):
    job = held(cluster)
    (rank,) = prepared(job.status())
    other = (rank + 1) % 4
    job.release()
    job.wait_state(other, 9)
    job.kill(other)
    job.check_repaired(reference("ddp-full", STEPS), [other])
    spare = job.account.pids(other)[1]
    assert [event["rank"] for event in job.account.of("prepare") if event["pid"] == spare] == [rank]


@pytest.mark.slow
def test_spares_are_for_different_ranks_and_the_right_one_is_taken(cluster, reference):
    job = held(cluster, spares=2)
    assert prepared(job.status()) == [0, 1]
    pids = {spare["prepared"]: spare["pid"] for spare in job.status()["spares"]}
    job.release()
    job.wait_state(1, 9)
    job.kill(1)
    job.check_repaired(reference("ddp-full", STEPS), [1])
    assert job.account.pids(1)[1] == pids[1]


@pytest.mark.slow
def test_a_hot_spare_that_dies_is_replaced_by_another(cluster, reference):
    job = held(cluster)
    (spare,) = job.status()["spares"]
    os.kill(spare["pid"], signal.SIGKILL)
    job.wait_status(
        lambda status: [
            s for s in status["spares"] if s["prepared"] == 0 and s["phase"] == "ready" and s["pid"] != spare["pid"]
        ],
        "another",
    )
    job.release()
    job.check_repaired(reference("ddp-full", STEPS), [])


@pytest.mark.slow
def test_a_world_that_begins_again_does_not_use_what_was_rehearsed_before(cluster, reference):
    """A survivor that cannot be repaired once it has left its loop has the world come back: hot spares take part."""
    job = held(cluster, "--die", "rank=2,at=end")
    job.release()
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(reference("ddp-full", STEPS))
