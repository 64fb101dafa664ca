"""A script that never calls `init()` runs with torchrun's meaning."""

import pytest
from kit.choice import often


@pytest.fixture
def unmanaged(cluster, tmp_path):
    flags = tmp_path / "once"
    flags.mkdir()

    def start(*words, **options):
        return cluster("--flags", str(flags), *words, script="unmanaged.py", **options)

    return start


def test_it_runs(unmanaged):
    job = unmanaged()
    assert job.wait_exit() == 0, job.told()
    assert [e["total"] for e in job.account.of("end")] == [4.0**5] * 4
    job.check_nothing_left()


@pytest.mark.slow
def test_a_death_ends_it(unmanaged):
    job = unmanaged("--die", "2")
    assert job.wait_exit() == 1, job.told()
    assert not job.account.of("end")
    job.check_nothing_left()


@pytest.mark.parametrize("spares", often([0, 1], {1}))
def test_a_death_restarts_it_if_that_is_allowed(unmanaged, spares):
    job = unmanaged("--die", "2", options=("--max-restarts", "1"), spares=spares)
    assert job.wait_exit() == 0, job.told()
    ends = job.account.of("end", restart=1)
    assert [e["total"] for e in ends] == [4.0**5] * 4
    assert sorted(e["met"] for e in ends) == [1, 2, 3, 4]  # nothing is left in the store of the first life
    waited = set(range(4 + spares)) - {e["worker"] for e in job.account.of("start", restart=0)}
    assert len(waited) == spares
    assert waited <= {e["worker"] for e in ends}
    job.check_nothing_left()


@pytest.mark.slow
def test_restarts_are_bounded(unmanaged):
    job = unmanaged("--die", "2", "--always", options=("--max-restarts", "2"))
    assert job.wait_exit() == 1, job.told()
    assert {e["restart"] for e in job.account.of("start")} == {0, 1, 2}
    job.check_nothing_left()
