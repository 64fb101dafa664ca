"""A job that was lost with all its memory goes on from its durable checkpoint, to the last bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.choice import often
from kit.cluster import SCRIPTS
from kit.processes import marked, wait_gone

STEPS = 12
HELD = 6
PLAIN = SCRIPTS / "plain_load.py"


def durable(place, *more):
    return ("--durable", str(place), "--durable-every", "1", *more)


def after(reference, layout, first, steps=STEPS):
    return {at: digest for at, digest in reference(layout, steps).items() if at[1] >= first}


def lost(cluster, place, layout, *, held=HELD, options=()):
    """Run a job until this version is durable, and kill its launcher."""
    job = cluster(
        *("--layout", layout, "--steps", str(STEPS), "--hold", str(held)), spares=0, options=durable(place, *options)
    )
    job.wait_event("held")
    job.wait_stderr(f"step {held} is durable")
    job.signal_agent(signal.SIGKILL)
    assert job.wait_exit() == -signal.SIGKILL
    assert not wait_gone(job.mark, 10)
    return job


@pytest.mark.parametrize("layout", often(["ddp-full", "fsdp", "hsdp", "tp", "pp", "plain"], {"ddp-full", "tp"}))
def test_a_job_whose_launcher_was_killed_goes_on(cluster, reference, tmp_path, layout):
    lost(cluster, tmp_path / "kept", layout)
    job = cluster("--layout", layout, "--steps", str(STEPS), spares=0, options=durable(tmp_path / "kept"))
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(after(reference, layout, HELD))
    assert min(version for _, version in job.account.states()) == HELD
    assert f"resuming at step {HELD}" in job.stderr
    job.check_nothing_left()
    assert sorted(os.listdir(tmp_path / "kept"))[-1] == f"step-{STEPS:08d}"
    assert len(os.listdir(tmp_path / "kept")) <= 2


def test_a_rank_that_dies_after_the_job_went_on_is_replaced(cluster, reference, tmp_path):
    lost(cluster, tmp_path / "kept", "ddp-full")
    job = cluster(
        *("--layout", "ddp-full", "--steps", str(STEPS), "--die", f"rank=2,step={HELD + 3},at=backward,n=1"),
        options=durable(tmp_path / "kept"),
    )
    job.check_repaired(after(reference, "ddp-full", HELD), [2])


def test_a_rank_that_dies_before_the_job_went_on_has_it_begin_from_there_again(cluster, reference, tmp_path):
    lost(cluster, tmp_path / "kept", "ddp")
    job = cluster(
        "--layout", "ddp", "--steps", str(STEPS), "--die", "rank=1,at=setup", options=durable(tmp_path / "kept")
    )
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(after(reference, "ddp", HELD))
    assert len(job.account.of("dying")) == 1
    assert job.stderr.count(f"resuming at step {HELD}") == 2
    job.check_nothing_left()


def test_a_writer_that_is_killed_midway_leaves_the_older_one(cluster, reference, tmp_path):
    kept = tmp_path / "kept"
    lost(cluster, kept, "ddp")
    older = f"step-{HELD:08d}"
    job = cluster(
        *("--layout", "ddp", "--steps", str(STEPS), "--hold", "9"),
        spares=0,
        options=("--durable", str(kept), "--durable-every", "1000"),
    )
    job.wait_event("held")
    job.signal_agent(signal.SIGUSR1)
    writer = stopped_writer(job)
    os.kill(writer, signal.SIGKILL)
    job.wait_stderr("no durable checkpoint could be written: the process that writes it was killed by SIGKILL")
    job.signal_agent(signal.SIGKILL)
    job.wait_exit()
    assert not wait_gone(job.mark, 10)
    assert older in os.listdir(kept)
    again = cluster("--layout", "ddp", "--steps", str(STEPS), spares=0, options=durable(kept))
    assert again.wait_exit() == 0, again.told()
    assert f"resuming at step {HELD}" in again.stderr
    again.account.check_same_as(after(reference, "ddp", HELD))
    assert not [name for name in os.listdir(kept) if name.endswith((".tmp", ".old"))]


def stopped_writer(job):
    """Stop the checkpointer as soon as it exists; return its pid."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for pid in marked(job.mark):
            if comm(pid) == "deadpool-save":
                os.kill(pid, signal.SIGSTOP)
                return pid
        os.sched_yield()
    raise AssertionError(f"no checkpointer within 20 s\n{job.told()}")


def comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def test_a_foretold_end_leads_to_a_checkpoint_and_exit_75(cluster, reference, tmp_path):
    options = ("--durable", str(tmp_path / "kept"), "--durable-every", "60m")
    job = cluster("--layout", "fsdp", "--steps", str(STEPS), "--hold", "5", spares=1, options=options)
    job.wait_event("held")
    job.signal_agent(signal.SIGUSR1)
    assert job.wait_exit() == 75, job.told()
    job.check_nothing_left()
    assert os.listdir(tmp_path / "kept") == ["step-00000005"]
    job = cluster("--layout", "fsdp", "--steps", str(STEPS), spares=1, options=options)
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(after(reference, "fsdp", 5))


def test_an_end_that_was_foretold_only_to_save_is_not_one(cluster, tmp_path):
    options = ("--durable", str(tmp_path / "kept"), "--durable-every", "60m", "--on-usr1", "save")
    job = cluster("--steps", str(STEPS), "--hold", "5", spares=0, options=options)
    job.wait_event("held")
    job.signal_agent(signal.SIGUSR1)
    job.wait_stderr("step 5 is durable")
    job.release()
    assert job.wait_exit() == 0, job.told()
    assert sorted(os.listdir(tmp_path / "kept")) == ["step-00000005", f"step-{STEPS:08d}"]


def test_a_world_of_another_size_is_refused_before_training(cluster, tmp_path):
    lost(cluster, tmp_path / "kept", "ddp")
    job = cluster("--layout", "ddp", "--steps", "12", nproc=2, spares=0, options=durable(tmp_path / "kept"))
    assert job.wait_exit() == 1
    assert "it is of 4 ranks, and this world has 2" in job.stderr
    assert not job.account.of("start")
    job.check_nothing_left()


def test_another_model_is_refused(cluster, tmp_path):
    lost(cluster, tmp_path / "kept", "ddp")
    job = cluster("--layout", "fsdp", "--steps", "12", spares=0, options=durable(tmp_path / "kept"))
    assert job.wait_exit() == 1
    assert "is not one of these objects" in job.stderr
    assert not job.account.of("state")
    assert sorted(os.listdir(tmp_path / "kept"))[-1] == f"step-{HELD:08d}"


@pytest.mark.parametrize("layout", often(["ddp-full", "fsdp", "hsdp", "tp"], {"ddp-full", "tp"}))
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
