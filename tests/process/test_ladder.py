"""Every rung of the ladder: what is lost, and what must come of it."""

import os
import signal

import pytest
from kit.choice import often
from kit.cluster import Cluster

from deadpool_run.agent.node.hang_detector import is_stopped
from deadpool_run.vault.status_page import Phase

STEPS = 12


def train(cluster, *words, layout="ddp-full", steps=STEPS, **options) -> Cluster:
    return cluster("--layout", layout, "--steps", str(steps), *words, **options)


def die(*faults):
    return [word for fault in faults for word in ("--die", fault)]


def replacements(job):
    """Return whether each loss was made good by a spare, in order."""
    return [loss["from_spare"] for incident in job.incidents() for loss in incident["losses"]]


def test_without_a_spare_the_rank_starts_again_in_place(cluster, reference):
    job = train(cluster, *die("rank=2,step=5,at=forward"), spares=0)
    job.check_repaired(reference("ddp-full", STEPS), [2])
    assert replacements(job) == [False]


def test_the_pool_heals(cluster, reference):
    job = train(cluster, "--hold", "7", *die("rank=3,step=4,at=backward"))
    job.wait_event("held")
    job.wait_status(lambda status: status["spares"], "spare again")
    job.release()
    job.wait_state(3, 9)
    job.kill(3)
    job.check_repaired(reference("ddp-full", STEPS), [3, 3])
    assert replacements(job) == [True, True]


@pytest.mark.parametrize("spares", often([0, 1, 2], {1}))
def test_two_deaths_in_one_step(cluster, reference, spares):
    job = train(cluster, *die("rank=1,step=5,at=forward", "rank=2,step=5,at=forward"), spares=spares)
    job.check_repaired(reference("ddp-full", STEPS), [1, 2])


@pytest.mark.slow
def test_all_but_one_die_in_one_step(cluster, reference):
    job = train(cluster, *die(*(f"rank={rank},step=6,at=before" for rank in (0, 2, 3))), layout="fsdp")
    job.check_repaired(reference("fsdp", STEPS), [0, 2, 3])


def test_everyone_dies_in_one_step(cluster, reference):
    job = train(cluster, *die(*(f"rank={rank},step=6,at=before" for rank in range(4))), layout="fsdp")
    job.check_repaired(reference("fsdp", STEPS), [0, 1, 2, 3])


@pytest.mark.parametrize("step", often([0, 1], {1}))
def test_the_replacement_dies_in_its_rehearsal(cluster, reference, step):
    job = train(cluster, *die("rank=1,step=5,at=collective", f"rank=1,step={step},at=rehearsal"))
    job.check_repaired(reference("ddp-full", STEPS), [1, 1])


def until_one_stops_itself(cluster, *faults):
    """Start a job with these faults, of which one is to stop; return it and the process that has stopped itself."""
    job = train(cluster, *die(*faults), script="hanging.py")
    stopped = job.wait_event("dying", how="sigstop")["pid"]
    job.look_until(lambda: is_stopped(stopped), "stopped process")
    return job, stopped


@pytest.mark.slow
def test_a_survivor_dies_after_its_abort(cluster, reference):
    """While it waits for another one, which does not abort its step for a moment."""
    job, other = until_one_stops_itself(cluster, "rank=3,step=5,at=before,how=sigstop")
    job.kill(1)  # it waits for rank 3 in step 5's reduction, or is on its way there
    job.kill_when(2, lambda rank_entry: rank_entry.phase == Phase.ABORTED, "phase ABORTED")
    os.kill(other, signal.SIGCONT)
    job.check_repaired(reference("ddp-full", STEPS), [1, 2])


@pytest.mark.parametrize("rank", often([1, 2], {1}), ids=["replacement", "survivor"])
def test_a_rank_dies_as_it_attaches(cluster, reference, rank):
    faults = ("rank=1,step=5,at=collective", "rank=1,step=1,at=rehearsal,how=sigstop")
    job, replacement = until_one_stops_itself(cluster, *faults)
    with job.store_stopped():
        os.kill(replacement, signal.SIGCONT)
        job.kill_when(rank, lambda rank_entry: rank_entry.phase == Phase.ATTACHING, "phase ATTACHING")
    job.check_repaired(reference("ddp-full", STEPS), [1, rank])


@pytest.mark.parametrize("at", often(["before", "optimizer,n=3", "after"], {"optimizer,n=3"}))
def test_rank_0_dies(cluster, reference, at):
    job = train(cluster, *die(f"rank=0,step=5,at={at}"), layout="pp")
    job.check_repaired(reference("pp", STEPS), [0])


@pytest.mark.slow
def test_a_spare_dies_and_nobody_notices(cluster, reference):
    job = train(cluster, "--hold", "5")
    job.wait_event("held")
    (spare,) = job.status()["spares"]
    os.kill(spare["pid"], signal.SIGKILL)
    job.wait_status(lambda status: [s for s in status["spares"] if s["pid"] != spare["pid"]], "another spare")
    job.release()
    job.check_repaired(reference("ddp-full", STEPS), [])


@pytest.mark.parametrize(
    "at",
    often(
        ["at=setup", "at=forward,step=0", "at=after,step=0", "at=optimizer,step=1,n=5"],
        {"at=setup", "at=optimizer,step=1,n=5"},
    ),
)
def test_a_death_before_anything_can_be_replayed_starts_the_world_again(cluster, reference, at):
    job = train(cluster, *die(f"rank=2,{at}"))
    job.check_repaired(reference("ddp-full", STEPS), [0, 1, 2, 3])
    assert {e["restart"] for e in job.account.of("end")} == {1}
    ended = [line["event"] for line in job.journal() if line["event"]["type"] == "WorkerExited"]
    assert {each["signal"] for each in ended} == {signal.SIGKILL, None}, "no survivor crashed"


@pytest.mark.slow
@pytest.mark.parametrize("at", ["forward", "optimizer,n=3", "after", "between"])
def test_a_death_in_the_last_step(cluster, reference, at):
    job = train(cluster, *die(f"rank=2,step={STEPS - 1},at={at}"))
    job.check_repaired(reference("ddp-full", STEPS), [2])


def test_any_way_of_dying(cluster, reference):
    hows = ("sigterm", "sigsegv", "exit", "_exit")
    job = train(cluster, *die(*(f"rank={n},step={3 + 2 * n},at=forward,how={how}" for n, how in enumerate(hows))))
    job.check_repaired(reference("ddp-full", STEPS), [0, 1, 2, 3])


def test_an_exception_on_one_rank_alone_is_a_fault(cluster, reference):
    job = train(cluster, *die("rank=2,step=5,at=forward,how=raise-once"))
    job.check_repaired(reference("ddp-full", STEPS), [2])
    assert "BugError in step 5" in job.stderr


@pytest.mark.slow
def test_the_same_exception_on_all_ranks_stops_the_job_before_any_is_replaced(cluster):
    job = train(cluster, *die(*(f"rank={rank},step=5,at=optimizer,how=raise" for rank in range(4))))
    assert job.wait_exit() == 1
    assert job.stderr.count("Traceback (most recent call last)") == 1, "they are the same, and shown once"
    assert {len(job.account.pids(rank)) for rank in range(4)} == {1}
    job.check_nothing_left()


@pytest.mark.slow
def test_a_bug_that_survivors_see_too_stops_the_job(cluster):
    """They raise in their interrupted step what another has raised in an undisturbed one: no spare is tried."""
    job = train(cluster, "--astray", "bug", *die("rank=1,step=5,at=counted,how=raise"))
    assert job.wait_exit() == 1
    assert "a bug in the script" in job.stderr
    job.check_nothing_left()


def test_a_bug_of_the_script_stops_the_job_and_is_shown(cluster):
    job = train(cluster, *die("rank=2,step=5,at=forward,how=raise"))
    assert job.wait_exit() == 1
    assert len(job.account.pids(2)) == 2, "one replacement tells a bug from a fault; more would burn spares"
    assert job.stderr.count("BugError: a tensor that the script should have checked") == 1, "once, not for each rank"
    assert "a bug in the script" in job.stderr
    assert {len(job.account.pids(rank)) for rank in (0, 1, 3)} == {1}
    job.check_nothing_left()
