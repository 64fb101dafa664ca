"""A job with too little memory for its snapshots goes on without them, and nothing is ended by the kernel."""

import signal
from pathlib import Path

import pytest
from kit.memory_group import memory_group

MIB = 1 << 20
BALLAST = 96
"""MiB of state of each rank. Two ranks take four times this for their snapshots."""


@pytest.mark.timeout(300)
def test_a_job_without_memory_for_snapshots_goes_on(cluster):
    with memory_group("deadpool-test-job") as group:

        def trained():
            job = cluster(str(BALLAST), "12", script="ballast.py", nproc=2, spares=0, within=group.command)
            assert job.wait_exit(120) == 0, job.told()
            return job, sorted(job.stdout.split())

        roomy, reference = trained()
        assert "no memory" not in roomy.stderr
        # Room for two of the four slots, and for the sixteenth that is left free.
        group.limit((group.peak() - 2 * BALLAST * MIB + BALLAST // 2 * MIB) * 16 // 15)
        tight, weights = trained()
        assert weights == reference
        assert group.kills() == 0
        assert "takes no snapshot: no memory for a snapshot of " in tight.stderr


@pytest.mark.timeout(300)
def test_a_limit_on_snapshot_memory_leaves_some_ranks_without(cluster):
    """Two ranks take two slots at least; the limit has room for one."""
    options = ("--snapshot-memory", f"{BALLAST * 3 // 2}MiB")
    job = cluster(str(BALLAST), "12", script="ballast.py", nproc=2, spares=0, options=options)
    assert job.wait_exit(120) == 0, job.told()
    assert f"of --snapshot-memory {BALLAST * 3 // 2 * MIB / 1e6:.0f} MB are left" in job.stderr


def test_the_kernel_ends_workers_before_the_agent(cluster):
    job = cluster("--layout", "ddp", "--steps", "400", nproc=2, spares=0)
    job.wait_state(0, 2)
    scores = {pid: score_of(pid) for pid in (job.pid, job.pid_of(0), job.pid_of(1))}
    own = scores.pop(job.pid)
    assert set(scores.values()) == {min(1000, own + 500)}
    job.signal_agent(signal.SIGTERM)
    job.wait_exit()


def score_of(pid):
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii"))
