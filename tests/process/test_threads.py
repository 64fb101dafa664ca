"""A number of threads that the script sets before its import of torch takes effect, although the import was earlier."""

import pytest


@pytest.mark.parametrize(("words", "expected"), [((), 3), (("--own",), 2)])
def test_torch_uses_as_many_threads_as_the_script_has_set(cluster, words, expected):
    job = cluster(*words, script="threads.py", nproc=2, spares=0)
    assert job.wait_exit() == 0, job.told()
    assert [event["found"] for event in job.account.of("threads")] == [expected, expected]
