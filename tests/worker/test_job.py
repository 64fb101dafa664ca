"""Errors for a script that calls its job too often, or with arguments that contradict each other."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool_run.errors import ScriptError
from deadpool_run.worker import job as job_module
from deadpool_run.worker.job import Job


@pytest.fixture
def job(monkeypatch):
    """A job of one rank without deadpool-run. Its world has no connections: Gloo's would outlive the test."""

    def init_world(_timeout):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)

    monkeypatch.setattr(job_module, "_init_unprotected", init_world)
    yield Job(None)
    dist.destroy_process_group()


def test_a_later_init_process_group_does_nothing_while_the_group_exists(job):
    dist.init_process_group("gloo")  # as a library does
    assert (job.world_size, dist.get_backend()) == (1, "fake")
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.get_world_size() == 2
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def test_a_job_has_one_step_loop(job):
    for index, step in enumerate(job.steps(2)):
        assert step.index == index
    with pytest.raises(ScriptError, match=r"steps\(\) was called twice.*\nLet it count the steps of all epochs"):
        for _ in job.steps(2):
            pass


def test_all_loaders_belong_into_one_call(job):
    loader = [1, 2, 3]
    job.batches(loader, steps=2, replay=True)
    with pytest.raises(ScriptError, match=r"batches\(\) was called twice.*\nPass all loaders to one call"):
        job.batches(loader, steps=2, replay=True)


@pytest.mark.parametrize("many", [{}, {"epochs": 1, "steps": 2}])
def test_batches_are_counted_in_epochs_or_in_steps(job, many):
    with pytest.raises(ScriptError, match=r"epochs.*steps.*\nPass one of them"):
        job.batches([1], replay=True, **many)


def test_several_loaders_give_tuples_and_the_first_counts_the_epochs(job):
    got = []
    for step, batch in job.batches([1, 2, 3], ["a", "b"], epochs=2, replay=True):
        got.append((step, batch))
    assert [batch for _, batch in got] == [(1, "a"), (2, "b"), (3, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert [step.epoch for step, _ in got] == [0, 0, 0, 1, 1, 1]
