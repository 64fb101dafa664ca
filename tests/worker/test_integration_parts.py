"""Parts of the frameworks' integrations: batches from any position, and optimizers that swallow an abort."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from deadpool_run.errors import ScriptError, StepAborted
from deadpool_run.integrations.driver import StepDriver, guard
from deadpool_run.integrations.seekable import SeekableLoader

DATA = TensorDataset(torch.arange(22))


def own_generator():
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(3))
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last=False))


def with_epochs():
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1)
    return DataLoader(DATA, batch_size=4, sampler=sampler)


def plain(batches):
    return [batch[0].tolist() for batch in batches]


def epochs_of(make):
    """The batches of the loader itself, epoch by epoch."""
    loader, found = make(), []
    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        found.append(plain(loader))
    return found


@pytest.mark.parametrize("make", [own_generator, with_epochs])
def test_batches_are_the_loaders_own_from_any_place(make):
    expected = epochs_of(make)
    assert expected[0] != expected[1]
    batches = SeekableLoader(make())
    for epoch, position in ((0, 0), (0, 2), (2, 1), (2, 0)):
        assert plain(batches.at(epoch, position)) == expected[epoch][position:]
    other = SeekableLoader(make())
    list(other.at(0, 0))
    other.load_state_dict(batches.state_dict())
    assert plain(other.at(2, 1)) == expected[2][1:]


def test_a_rollback_over_an_epochs_end_is_in_the_state():
    expected = epochs_of(own_generator)
    batches = SeekableLoader(own_generator())
    list(batches.at(0, 0))
    state = batches.state_dict()
    list(batches.at(1, 0))
    batches.load_state_dict(state)
    assert plain(batches.at(0, 3)) == expected[0][3:]
    assert plain(batches.at(1, 0)) == expected[1]


def test_only_an_epochs_begin_draws_from_the_global_generator():
    batches = SeekableLoader(with_epochs())
    before = torch.get_rng_state()
    list(batches.at(1, 2))
    list(batches.at(1, 0, draw=False))
    assert torch.equal(torch.get_rng_state(), before)
    list(batches.at(1, 0))
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_a_stream_is_refused():
    with pytest.raises(ScriptError, match="IterableDataset"):
        SeekableLoader(DataLoader(Stream()))


def test_a_guarded_optimizer_calls_its_closure_before_it_can_be_stopped():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    called = []

    def stop(*_):
        assert called == ["closure"]
        raise StepAborted("a peer was lost")

    handle = optimizer.register_step_pre_hook(stop)
    guard(optimizer)
    guard(optimizer)

    def closure():
        called.append("closure")
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.tolist() == [1.0, 1.0]
    handle.remove()
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.8, 0.8])


class Book:
    """A job whose steps note that they begin and end; the second is repeated."""

    rehearsing, interrupted = False, True

    def __init__(self):
        self.noted = []

    def steps(self):
        for self.index in (0, 1, 1):
            yield self

    def __enter__(self):
        self.noted.append(f"begin {self.index}")

    def __exit__(self, *_):
        self.noted.append(f"end {self.index}")


def test_a_driver_ends_each_step_before_the_next_begins():
    driver = StepDriver(None, book := Book())
    assert not driver.is_discarded  # before its first step
    driver._steps = book.steps()
    assert [driver.next() for _ in range(4)] == [0, 1, 1, None]
    assert book.noted == ["begin 0", "end 0", "begin 1", "end 1", "begin 1", "end 1"]
    assert driver.is_discarded
