"""A rank that is lost before or after the step loop: no survivor is given a fake result, which nothing would discard."""

import pytest


@pytest.mark.parametrize(
    ("at", "leave"),
    [("before", ()), ("after", ()), ("after", ("--break",))],
    ids=["before", "after", "after a break"],
)
def test_a_collective_outside_the_loop_returns_what_the_ranks_have_reduced_or_nothing(cluster, tmp_path, at, leave):
    flags = tmp_path / "once"
    flags.mkdir()
    job = cluster("--die", at, *leave, "--flags", str(flags), script="outside.py", nproc=2)
    assert job.wait_exit() == 0, job.told()
    totals = job.account.of("total")
    assert {event["value"] for event in totals} == {3.0}
    assert len([event for event in totals if event["at"] == at]) > 2 * 5  # some of it ran twice
    job.check_nothing_left()
