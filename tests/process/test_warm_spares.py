"""A warm spare has copied the memory that set-up and the first steps write, before it is needed."""

from pathlib import Path

from kit.processes import marked

STEPS = 20
LEAST_KB = 8 << 10
"""Of what set-up and the first steps write, in a process that has imported torch."""


def copied_kb(pid):
    """Return the memory that is no longer shared with the fork server."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return int(next(row for row in rows if row.startswith("Private_Dirty")).split()[1])


def test_a_spare_has_the_memory_before_it_is_promoted(cluster, reference):
    job = cluster("--layout", "ddp-full", "--steps", str(STEPS), "--hold", "6", nproc=4, spares=1)
    job.wait_event("held")
    (spare,) = (each["pid"] for each in job.status()["spares"])
    assert spare in marked(job.mark)
    job.look_until(lambda: copied_kb(spare) > LEAST_KB, "memory of the spare")
    job.release()
    job.kill(1)
    job.check_repaired(reference("ddp-full", STEPS), [1])
    assert job.account.pids(1)[1] == spare
