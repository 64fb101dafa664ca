"""A job that was lost with all its memory goes on from its durable checkpoint, to the last bit."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.choice import often
from kit.cluster import SCRIPTS, Cluster
from kit.processes import marked, wait_gone

from deadpool_run.cli.runs.client import ControlClient

STEPS = 12
HELD = 6
PLAIN = SCRIPTS / "plain_load.py"
BALLAST = {"ddp": ("--ballast-mb", "64")}
"""So that a checkpoint of this layout takes long enough to be met on its way."""


def durable(place, *more):
    return ("--durable", str(place), "--durable-every", "1", *more)


def names(place):
    return sorted(path.name for path in place.iterdir())


def after(reference, layout, first, steps=STEPS):
    return {at: digest for at, digest in reference(layout, steps).items() if at[1] >= first}


@pytest.fixture(scope="session")
def _killed(tmp_path_factory):
    """Return where a job of a layout has its checkpoints whose launcher was killed once this version was durable."""
    known = {}

    def place(layout):
        if layout not in known:
            home = tmp_path_factory.mktemp(layout)
            words = ("--layout", layout, "--steps", str(STEPS), "--hold", str(HELD))
            job = Cluster(home, *words, *BALLAST.get(layout, ()), spares=0, options=durable(home / "kept"))
            try:
                job.wait_event("held")
                job.wait_stderr(f"step {HELD} is durable")
                job.signal_agent(signal.SIGKILL)
                assert job.wait_exit() == -signal.SIGKILL
                assert not wait_gone(job.mark, 10)
            finally:
                job.close()
            known[layout] = home / "kept"
        return known[layout]

    return place


@pytest.fixture
def killed(_killed, tmp_path):
    """Return a place of the test's own with the checkpoints of a killed job of a layout."""

    def place(layout):
        shutil.copytree(_killed(layout), tmp_path / "kept")
        return tmp_path / "kept"

    return place


@pytest.mark.parametrize("layout", often(["ddp-full", "fsdp", "hsdp", "tp", "pp", "plain"], {"tp"}))
def test_a_job_whose_launcher_was_killed_goes_on(cluster, reference, killed, layout):
    kept = killed(layout)
    job = cluster("--layout", layout, "--steps", str(STEPS), *BALLAST.get(layout, ()), spares=0, options=durable(kept))
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(after(reference, layout, HELD))
    assert min(version for _, version in job.account.states()) == HELD
    assert f"resuming at step {HELD}" in job.stderr
    job.check_nothing_left()
    assert names(kept)[-1] == f"step-{STEPS:08d}"
    assert len(names(kept)) <= 2


@pytest.mark.slow
def test_a_rank_that_dies_after_the_job_went_on_is_replaced(cluster, reference, killed):
    kept = killed("ddp-full")
    job = cluster(
        *("--layout", "ddp-full", "--steps", str(STEPS), "--die", f"rank=2,step={HELD + 3},at=backward,n=1"),
        options=durable(kept),
    )
    job.check_repaired(after(reference, "ddp-full", HELD), [2])


@pytest.mark.slow
def test_a_rank_that_dies_before_the_job_went_on_has_it_begin_from_there_again(cluster, reference, killed):
    kept = killed("ddp-full")
    fault = "rank=1,step=1,at=rehearsal"
    job = cluster("--layout", "ddp-full", "--steps", str(STEPS), "--die", fault, options=durable(kept))
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(after(reference, "ddp-full", HELD))
    assert len(job.account.of("dying")) == 1
    assert job.stderr.count(f"resuming at step {HELD}") == 2
    job.check_nothing_left()


@pytest.mark.slow
def test_a_writer_that_is_killed_midway_leaves_the_older_one(cluster, reference, killed):
    kept, held = killed("ddp"), 9
    words = ("--layout", "ddp", "--steps", str(STEPS), *BALLAST["ddp"])
    job = cluster(*words, "--hold", str(held), spares=0, options=("--durable", str(kept), "--durable-every", "1000"))
    job.wait_event("held")
    job.signal_agent(signal.SIGUSR1)
    writer = look_for(lambda: writer_of(job), "checkpointer")
    unfinished = look_for(lambda: unfinished_in(kept), "directory that is being written")
    assert unfinished.name.startswith(f"step-{held:08d}.")
    os.kill(writer, signal.SIGKILL)
    job.wait_stderr("no durable checkpoint could be written: the process that writes it was killed by SIGKILL")
    assert unfinished.is_dir(), "the writer was done before it was killed"
    job.signal_agent(signal.SIGKILL)
    job.wait_exit()
    again = cluster(*words, spares=0, options=durable(kept))
    assert again.wait_exit() == 0, again.told()
    assert f"resuming at step {HELD}" in again.stderr
    again.account.check_same_as(after(reference, "ddp", HELD))
    assert not [name for name in names(kept) if name.endswith((".tmp", ".old"))]


@pytest.mark.slow
def test_the_last_step_is_durable_though_its_writer_is_killed(cluster, reference, tmp_path):
    kept, words = tmp_path / "kept", ("--layout", "ddp", "--steps", str(STEPS), *BALLAST["ddp"])
    job = cluster(*words, spares=0, options=("--durable", str(kept), "--durable-every", "60m"))
    unfinished = look_for(lambda: unfinished_in(kept), "directory that is being written", limit_s=60)
    os.kill(look_for(lambda: writer_of(job), "checkpointer"), signal.SIGKILL)
    job.wait_stderr("no durable checkpoint could be written: the process that writes it was killed by SIGKILL")
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(reference("ddp", STEPS))
    assert names(kept) == [f"step-{STEPS:08d}"]
    assert not unfinished.exists()
    job.check_nothing_left()


@pytest.mark.slow
def test_storage_that_does_not_answer_is_given_up_and_training_goes_on(cluster, reference, tmp_path):
    """Opening a FIFO waits for a reader: here for ever, with the file that is written last."""
    kept, words = tmp_path / "kept", ("--layout", "ddp", "--steps", str(STEPS), *BALLAST["ddp"])
    options = ("--durable", str(kept), "--durable-every", "60m", "--on-usr1", "save", "--durable-timeout", "15")
    job = cluster(*words, "--hold", "5", spares=0, options=options)
    job.wait_event("held")
    job.signal_agent(signal.SIGUSR1)
    unfinished = look_for(lambda: unfinished_in(kept), "directory that is being written")
    os.mkfifo(unfinished / "deadpool.json")
    job.wait_stderr(
        "no durable checkpoint could be written: the process that writes it was not done within 15 s (--durable-timeout)"
    )
    assert not writer_of(job)
    job.release()
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(reference("ddp", STEPS))
    assert names(kept) == [f"step-{STEPS:08d}"]
    job.check_nothing_left()


@pytest.mark.slow
def test_storage_that_does_not_answer_at_the_beginning_ends_the_job_and_says_why(cluster, tmp_path):
    kept = tmp_path / "kept"
    (kept / "step-00000004").mkdir(parents=True)
    os.mkfifo(kept / "step-00000004" / "deadpool.json")
    job = cluster("--steps", "4", nproc=2, spares=0, options=durable(kept, "--durable-timeout", "1"))
    assert job.wait_exit() == 1
    assert "the process that reads checkpoints was not done within 1 s (--durable-timeout)" in job.stderr
    assert not job.account.of("start")
    job.check_nothing_left()


def look_for(seen, what, limit_s=20):
    """Look until it is seen, as fast as can be: nothing can wait for a process to begin or for a directory to appear."""
    deadline = time.monotonic() + limit_s
    while not (found := seen()):
        os.sched_yield()
        assert time.monotonic() < deadline, f"no {what} within {limit_s} s"
    return found


def unfinished_in(place):
    return next(place.glob("*.tmp"), None)


def writer_of(job):
    return next((pid for pid in marked(job.mark) if comm(pid) == "deadpool-save"), None)


def comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def test_a_preemption_notice_end_leads_to_a_checkpoint_and_exit_75(cluster, reference, tmp_path):
    options = ("--durable", str(tmp_path / "kept"), "--durable-every", "60m")
    job = cluster("--layout", "fsdp", "--steps", str(STEPS), "--hold", "5", spares=1, options=options)
    job.wait_event("held")
    job.signal_agent(signal.SIGUSR1)
    assert job.wait_exit() == 75, job.told()
    job.check_nothing_left()
    assert names(tmp_path / "kept") == ["step-00000005"]
    job = cluster("--layout", "fsdp", "--steps", str(STEPS), spares=1, options=options)
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(after(reference, "fsdp", 5))


@pytest.mark.slow
def test_an_end_that_was_preemption_notice_only_to_save_is_not_one(cluster, tmp_path):
    options = ("--durable", str(tmp_path / "kept"), "--durable-every", "60m", "--on-usr1", "save")
    job = cluster("--steps", str(STEPS), "--hold", "5", spares=0, options=options)
    job.wait_event("held")
    job.signal_agent(signal.SIGUSR1)
    job.wait_stderr("step 5 is durable")
    with ControlClient(job.run_dir) as viewer:
        shown = viewer.ask({"do": "status"})["durable"]
    assert (shown["version"], shown["where"]) == (5, str(tmp_path / "kept" / "step-00000005"))
    job.release()
    assert job.wait_exit() == 0, job.told()
    assert names(tmp_path / "kept") == ["step-00000005", f"step-{STEPS:08d}"]


@pytest.mark.slow
def test_a_world_of_another_size_is_refused_before_training(cluster, killed):
    kept = killed("ddp-full")
    job = cluster("--layout", "ddp-full", "--steps", "12", nproc=2, spares=0, options=durable(kept))
    assert job.wait_exit() == 1
    assert "it has 4 ranks, and this world has 2" in job.stderr
    assert not job.account.of("start")
    job.check_nothing_left()


def test_a_place_that_cannot_be_written_to_is_refused_before_training(cluster, tmp_path):
    (tmp_path / "file").touch()
    job = cluster("--steps", "4", nproc=2, spares=0, options=durable(tmp_path / "file" / "kept"))
    assert job.wait_exit() == 1
    assert f"{tmp_path / 'file' / 'kept'}: Not a directory" in job.stderr
    assert not job.account.of("start")
    job.check_nothing_left()


@pytest.mark.slow
def test_another_model_is_refused(cluster, killed):
    kept = killed("ddp-full")
    job = cluster("--layout", "fsdp", "--steps", "12", spares=0, options=durable(kept))
    assert job.wait_exit() == 1
    assert "does not fit the objects" in job.stderr
    assert not job.account.of("state")
    assert names(kept)[-1] == f"step-{HELD:08d}"


@pytest.mark.parametrize("layout", often(["ddp-full", "fsdp", "hsdp", "tp"], {"ddp-full"}))
def test_torch_alone_can_load_it(cluster, tmp_path, layout):
    """Parameters, buffers and optimizer state, into a model that is not distributed at all."""
    whole = tmp_path / "whole.pt"
    job = cluster(layout, "5", str(whole), script="whole_state.py", spares=0, options=durable(tmp_path / "kept"))
    assert job.wait_exit() == 0, job.told()
    result = subprocess.run(
        [sys.executable, str(PLAIN), layout, str(tmp_path / "kept" / "step-00000005"), str(whole)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same" in result.stdout
