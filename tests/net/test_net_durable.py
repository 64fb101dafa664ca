"""A job over several hosts that was lost with all its memory goes on from its durable checkpoint, to the last bit."""

import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from kit.processes import marked

from deadpool_run.agent.processes.forkserver_main import COMMAND
from deadpool_run.cli.runs.client import ControlClient

STEPS = 24
THREE = {"hosts": 3, "spares": "0", "nproc": 1}
SPARE = {"hosts": 4, "spares": "1", "nproc": 1}
FIVE = {"hosts": 5, "spares": "2", "nproc": 1}


def train(fleet, place, *words, layout="fsdp", every="4", shape=THREE, more=()):
    options = ("--durable", str(place), "--durable-every", every, *more)
    return fleet("--layout", layout, "--steps", str(STEPS), "--least-ms", "100", *words, **shape, options=options)


def expected(reference, layout="fsdp", first=0):
    return {at: digest for at, digest in reference(layout, STEPS, 3).items() if at[1] >= first}


def versions(place):
    found = place.iterdir() if place.is_dir() else ()
    return [int(path.name.removeprefix("step-")) for path in found if not path.suffix]


def newest(place):
    return max(versions(place), default=-1)


def unfinished(place):
    return [path for path in place.iterdir() if path.suffix == ".tmp"] if place.is_dir() else []


@pytest.mark.slow
def test_a_job_that_ends_leaves_its_last_step(fleet, reference, tmp_path):
    job = train(fleet, tmp_path / "kept", shape=SPARE)
    job.check_repaired(expected(reference), [], [0, 1, 2, 3])
    assert newest(tmp_path / "kept") == STEPS
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.slow
def test_a_job_that_lost_every_host_is_started_again_from_the_newest_that_every_host_can_load(
    fleet, reference, tmp_path
):
    place = tmp_path / "kept"
    job = train(fleet, place)
    job.wait_until(lambda: len(versions(place)) > 1, "two versions on the disk")
    for host in range(3):
        job.power_off(host)
    job.wait_exit([0, 1, 2])
    damaged = place / f"step-{newest(place):08d}" / "rank-00002.deadpool"  # which only the last host needs
    os.truncate(damaged, damaged.stat().st_size // 2)
    first = sorted(versions(place))[-2]
    again = train(fleet, place)
    again.check_repaired(expected(reference, first=first), [], [0, 1, 2])
    assert min(version for _, version in again.account.states()) == first
    assert "rank-00002.deadpool is damaged" in again.agents[0].output
    assert f"resuming at step {first}" in again.agents[0].output
    assert newest(place) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("net", [5], indirect=True)
def test_a_rank_and_all_who_hold_its_state_are_lost_and_spare_hosts_go_on_from_the_disk(fleet, reference, tmp_path):
    """The owner and the buddy at once. Three of five hosts are left, a majority of the voters."""
    place = tmp_path / "kept"
    job = train(fleet, place, shape=FIVE)
    job.wait_until(lambda: newest(place) >= 8, "version 8 on the disk")
    with ControlClient(job.run_dir) as viewer:
        nodes = {int(node["node"].removeprefix("h")): node for node in viewer.ask({"do": "status"})["nodes"]}
    lost = next(
        {owner, buddy}
        for owner, node in nodes.items()
        for buddy, other in nodes.items()
        if owner and buddy and set(node["ranks"]) & set(other["copies_of"])
    )
    for host in lost:
        job.power_off(host)
    job.wait_output(0, "starting the world again from the newest durable checkpoint")
    begun, first = len(job.events), newest(place)
    assert job.wait_exit([host for host in range(5) if host not in lost]) == [0, 0, 0], job.told()
    job.account.check_same_as(expected(reference))
    assert min(e["version"] for e in job.events[begun:] if e["kind"] == "state") == first


@pytest.mark.slow
@pytest.mark.parametrize("told", ["the coordinator's", "another"])
def test_an_end_that_is_preemption_notice_to_any_host(fleet, reference, tmp_path, told):
    place = tmp_path / "kept"
    job = train(fleet, place, every="60m", shape=SPARE)
    for rank in range(3):
        job.wait_state(rank, 5)
    job.agents[0 if told == "the coordinator's" else 2].process.send_signal(signal.SIGUSR1)
    assert job.wait_exit([0, 1, 2, 3]) == [75] * 4
    first = newest(place)
    assert first >= 4
    again = train(fleet, place, every="60m", shape=SPARE)
    again.check_repaired(expected(reference, first=first), [], [0, 1, 2, 3])


@pytest.mark.slow
def test_whoever_leads_next_goes_on_with_the_checkpoints(fleet, reference, tmp_path):
    place = tmp_path / "kept"
    job = train(fleet, place, shape=SPARE)
    job.wait_until(lambda: newest(place) >= 4, "version 4 on the disk")
    ranks = [rank for rank in range(3) if job.host_of(rank) == 0]
    before = newest(place)
    job.power_off(0)
    job.wait_until(lambda: newest(place) > before, "a newer version on the disk")
    assert newest(place) < STEPS, "the job was over before the next coordinator wrote a checkpoint"
    leads = next(host for host in (1, 2, 3) if "leads the job now" in job.agents[host].output)
    with ControlClient(job.run_dir / f"node-h{leads}") as viewer:
        # The leader learns of it after it is on the disk.
        job.wait_until(lambda: viewer.ask({"do": "status"})["durable"]["version"] > before, "its version in the status")
        shown = viewer.ask({"do": "status"})["durable"]
    assert shown["where"] == str(place / f"step-{shown['version']:08d}")
    job.check_repaired(expected(reference), ranks, [1, 2, 3])
    assert newest(place) == STEPS
    assert not unfinished(place)


@pytest.mark.slow
def test_a_host_that_is_lost_while_one_is_written_makes_it_void(fleet, reference, tmp_path):
    place = tmp_path / "kept"
    job = train(fleet, place, shape=SPARE)
    homes = {}
    for rank in range(3):
        job.wait_state(rank, 1)
        homes[job.host_of(rank)] = rank
    lost = next(host for host in (1, 2, 3) if host in homes)
    stop_writer(job.agents[lost])
    job.power_off(lost)
    job.wait_output(0, "the durable checkpoint that was being written is void")
    job.check_repaired(expected(reference), [homes[lost]], [host for host in range(4) if host != lost])
    assert newest(place) == STEPS
    assert not unfinished(place)


@pytest.mark.slow
def test_a_host_whose_storage_does_not_answer_is_named_and_training_goes_on(fleet, reference, tmp_path):
    place = tmp_path / "kept"
    job = train(fleet, place, shape=SPARE, more=("--durable-timeout", "3"))
    homes = {rank: job.host_of(rank) for rank in range(3) if job.wait_state(rank, 1)}
    host = next(home for home in homes.values() if home)
    stop_writer(job.agents[host])
    job.wait_output(0, f"no durable checkpoint could be written: node h{host}: ")
    assert "was not done within 3 s (--durable-timeout)" in job.agents[0].output
    job.check_repaired(expected(reference), [], [0, 1, 2, 3])
    assert newest(place) == STEPS
    assert not unfinished(place)


# --- the coordinator is lost while the end is near ------------------------------------------------------------------


def held(fleet, place):
    """Return a job that writes nothing by itself, and stands still at step 5, with version 5 safe; and a host with a rank, not the first."""
    job = train(fleet, place, "--hold", "5", every="60m", shape=SPARE)
    job.wait_until(lambda: job.account.of("held"), "hold of the script")
    job.look_until(lambda: (job.status() or {}).get("committed") == 5, "version 5 that is safe")
    return job, next(job.host_of(rank) for rank in range(3) if job.host_of(rank))


def leads_next(job):
    return any("leads the job now" in job.agents[host].output for host in (1, 2, 3))


@pytest.mark.slow
def test_the_coordinator_is_lost_while_what_was_preemption_notice_is_written(fleet, tmp_path):
    """Every agent gets the signal, as from Slurm. The next leader starts a new write."""
    place = tmp_path / "kept"
    job, host = held(fleet, place)
    with stopped(forkserver_of(job.agents[host])):
        for agent in job.agents:
            agent.process.send_signal(signal.SIGUSR1)
        job.wait_output(0, "SIGUSR1: writing a durable checkpoint")
        job.power_off(0)
        job.look_until(lambda: leads_next(job), "another coordinator")
    assert job.wait_exit([1, 2, 3]) == [75] * 3, job.told()
    assert newest(place) >= 4
    assert not unfinished(place)


@pytest.mark.slow
def test_the_coordinator_is_lost_while_a_job_whose_end_was_preemption_notice_is_ended(fleet, tmp_path):
    """One worker does not end before whoever led is gone; only the log tells the next one why the job is ended."""
    job, host = held(fleet, tmp_path / "kept")
    rank = next(rank for rank in range(3) if job.host_of(rank) == host)
    with stopped(job.account.pids(rank)[-1]):
        job.agents[0].process.send_signal(signal.SIGUSR1)
        job.wait_output(0, "stopping the job")
        job.power_off(0)
        job.look_until(lambda: leads_next(job), "another coordinator")
    assert job.wait_exit([1, 2, 3]) == [75] * 3, job.told()
    assert newest(tmp_path / "kept") == 5


@pytest.mark.slow
def test_the_coordinator_is_lost_while_the_last_step_is_written(fleet, reference, tmp_path):
    """All ranks are through and gone: nobody is left but agents, and all of them hear that it ended well."""
    job, host = held(fleet, tmp_path / "kept")
    with stopped(forkserver_of(job.agents[host])):
        job.release()
        job.look_until(lambda: '"StopJob"' in (job.run_dir / "journal.jsonl").read_text(), "end of the workers")
        job.power_off(0)
        job.look_until(lambda: leads_next(job), "another coordinator")
    assert job.wait_exit([1, 2, 3]) == [0] * 3, job.told()
    job.account.check_same_as(expected(reference))


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def forkserver_of(agent):
    """Return the process that forks a host's others: without it a checkpoint that the host has a part in waits."""
    forks = [pid for pid, command in marked(agent.mark).items() if COMMAND in command]
    return min(forks, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]))


def stop_writer(agent):
    """Stop the process that writes a host's part, as soon as there is one: nothing can wait for a process to begin."""
    deadline = time.monotonic() + 60
    while not (found := [pid for pid in marked(agent.mark) if comm(pid) == "deadpool-save"]):
        assert time.monotonic() < deadline, "no checkpointer within 60 s"
        os.sched_yield()
    os.kill(found[0], signal.SIGSTOP)


def comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
