"""A rank dies, wherever it may be in a step: the job ends with every weight as if nothing had happened."""

import random
import sys
import time

import pytest
from kit.choice import often
from kit.cluster import LAYOUTS

from deadpool_run.vault.status_page import BUSY

PLACES = {
    "before the step": "at=before",
    "forward": "at=forward,n=1",
    "backward": "at=backward,n=2",
    "before a collective": "at=issue,n=0",
    "with a collective issued": "at=collective,n=1",
    "within a collective": "at=collective,n=0,us=300",
    "among an optimizer's kernels": "at=optimizer,n=7",
    "as the capture begins": "at=after",
    "1 ms into the capture": "at=after,us=1000",
    "after the step": "at=between",
}
STEPS = 12
IN_A_ROW = {"ddp-full", "pp"}


def case(layout, place, *, rare):
    return pytest.param(layout, place, id=f"{layout}-{place}", marks=[pytest.mark.slow] if rare else [])


def matrix():
    """Every layout with every place; by default one of each layout but those that die ten times in a row, and `ddp`, a part of one."""
    for row, layout in enumerate(LAYOUTS):
        for column, place in enumerate(PLACES):
            yield case(layout, place, rare=column != row or layout in {"ddp", *IN_A_ROW})


@pytest.mark.parametrize(("layout", "place"), list(matrix()))
def test_one_death(cluster, reference, layout, place):
    rank = (LAYOUTS.index(layout) + list(PLACES).index(place)) % 4
    fault = f"rank={rank},step=5,{PLACES[place]}"
    job = cluster("--layout", layout, "--steps", str(STEPS), "--die", fault, env={"COPY_THREAD": str(rank % 2)})
    job.check_repaired(reference(layout, STEPS), [rank])
    assert len(job.account.of("dying")) == 1


@pytest.mark.parametrize("layout", often(LAYOUTS, IN_A_ROW))
def test_ten_deaths_in_a_row(cluster, reference, layout):
    order = random.Random(layout).sample(sorted(PLACES), len(PLACES))
    faults = [(number % 4, 3 + 2 * number, PLACES[place]) for number, place in enumerate(order)]
    words = [word for rank, step, at in faults for word in ("--die", f"rank={rank},step={step},{at}")]
    job = cluster("--layout", layout, "--steps", "25", *words)
    job.check_repaired(reference(layout, 25), [rank for rank, _, _ in faults])
    assert len(job.account.of("dying")) == len(faults)


@pytest.mark.slow
def test_a_ddp_that_is_compiled_as_a_whole(cluster, reference):
    job = cluster("--layout", "ddp-compiled", "--steps", str(STEPS), "--die", "rank=2,step=5,at=before")
    job.check_repaired(reference("ddp-compiled", STEPS), [2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("layout", ["ddp-full", "pp", "tp"])
def test_deaths_at_any_moment(cluster, reference, layout, seed):
    """From outside, at seeded places of the run; the moment within a step is the machine's choice."""
    choose = random.Random(seed)
    job = cluster("--layout", layout, "--steps", "40")
    lost, version = [], 2
    for _ in range(4):
        rank = choose.randrange(4)
        version += choose.randrange(2, 8)
        job.wait_state(rank, version)
        until = time.perf_counter() + choose.random() * 0.01
        while time.perf_counter() < until:
            pass
        job.kill(rank)
        lost.append(rank)
        job.wait_event("start", rank=rank, nth=1 + lost.count(rank))
    job.check_repaired(reference(layout, 40), lost)


@pytest.mark.slow
def test_a_death_in_the_middle_of_a_long_capture(cluster, reference):
    job = cluster("--layout", "ddp", "--steps", str(STEPS), "--ballast-mb", "64", spares=1)
    job.wait_state(1, 3)
    job.kill_when(1, lambda rank_entry: BUSY in rank_entry.slots, "slot being written")
    job.check_repaired(reference("ddp", STEPS), [1])


def test_nobody_completes_a_step_while_a_peer_still_copies_the_one_before(cluster):
    """Else the peer's death would cost both steps."""
    job = cluster("--layout", "ddp", "--steps", "30", "--ballast-mb", "64", spares=0)
    job.wait_state(0, 3)
    rank_entries, copies = job.status_page.rank_entries, 0
    while not job.poll():
        for rank_entry in rank_entries:
            newest, own = max(each.completed for each in rank_entries), rank_entry.completed
            if BUSY in rank_entry.slots and rank_entry.completed == own:
                copies += 1
                assert newest <= own, f"a rank completed step {newest} while another copied {own}"
    assert job.exit_code == 0
    assert copies > 10, "the captures were too short to be seen"


@pytest.mark.slow
def test_a_death_that_a_user_injects(cluster, reference):
    job = cluster("--layout", "fsdp", "--steps", "40", "--hold", "20")
    job.wait_event("held")
    result = job.kill_rank(2)
    assert result.returncode == 0, result.stderr
    job.release()
    job.check_repaired(reference("fsdp", 40), [2])
    assert "injected" in job.stderr


def test_a_rank_that_a_user_lets_run_out_of_memory(cluster, reference):
    """It is in a collective, and ends as by any exception of its script. Nobody is to blame. A spare has no script, and just ends."""
    job = cluster("--layout", "fsdp", "--steps", str(STEPS), "--hold", "5")
    job.wait_event("held")
    spare = job.wait_status(lambda status: [each for each in status["spares"] if each["phase"] == "ready"], "a spare")
    ended = job.command_line("kill-rank", "--spare", "--how", "oom", "--yes")
    assert ended.returncode == 0, ended.stderr
    job.wait_stderr(f"spare worker {spare[0]['worker']}")
    result = job.kill_rank(2, "--how", "oom")
    assert result.returncode == 0, result.stderr
    job.release()
    job.check_repaired(reference("fsdp", STEPS), [2])
    (incident,) = job.incidents()
    (loss,) = incident["losses"]
    assert (loss["rank"], loss["injected"]) == (2, True)
    assert loss["cause"].startswith("raised OutOfMemoryError in step 5: CUDA out of memory. Injected by")
    assert "error of deadpool-run" not in job.stderr


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unfailed_run_is_torchruns(cluster, reference, layout):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    job = cluster("--layout", layout, "--steps", str(STEPS), launcher=torchrun)
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(reference(layout, STEPS))


@pytest.mark.parametrize("who", often(["replacement", "survivor"], {"replacement"}))
def test_one_wrong_bit_after_a_recovery_is_seen(cluster, reference, who):
    """Guards the guard: were the comparison blind, every test above would pass. The library sees it too."""
    job = cluster("--layout", "tp", "--steps", str(STEPS), "--die", "rank=1,step=5,at=forward", "--corrupt", who)
    assert job.wait_exit() in (94, 95), job.told()
    with pytest.raises(AssertionError, match="states that differ"):
        job.account.check_same_as(reference("tp", STEPS))
