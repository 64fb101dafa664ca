"""Persistent workers are state: to make them draws a random number, to use them again does not, and they draw numbers themselves."""

import random
from multiprocessing import resource_tracker

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from deadpool_run.errors import RefusedError
from deadpool_run.worker.compat.loaders import dismiss_workers, forget_loaders, has_workers, note_loaders, workers_of
from deadpool_run.worker.state.generators import seed_epoch
from deadpool_run.worker.variables.variables import Variables


class Numbers(Dataset):
    """Eight numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class Noise(Numbers):
    """Draws from every generator that a worker has, and shows its seed."""

    def __init__(self):
        self.own = np.random.default_rng(5)

    def __getitem__(self, index):
        drawn = [torch.rand(1).item(), random.random(), np.random.rand(), self.own.random()]  # noqa: NPY002
        return torch.tensor([*drawn, get_worker_info().seed % 1000], dtype=torch.float64)


class Stream(IterableDataset):
    """A stream of noise, in an order that the worker's seed decides."""

    def __iter__(self):
        order = random.Random(get_worker_info().seed)
        return ((order.random(), torch.rand(1).item()) for _ in range(4))


class Eager(torch.utils.data.Sampler):
    """Draws before its first index, and so before the seed of the workers."""

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.randperm(8).tolist())


@pytest.fixture(scope="module", autouse=True)
def _tracker():
    """Workers that are not forked start this process, which stays."""
    resource_tracker.ensure_running()


@pytest.fixture
def made():
    """Make loaders with persistent workers, and end these after the test."""
    note_loaders(seed_epoch)
    forget_loaders()
    found = []

    def make(kind=DataLoader, dataset=Numbers, workers=1, **options):
        found.append(kind(dataset(), 2, num_workers=workers, persistent_workers=True, **options))
        return found[-1]

    yield make
    for each in found:
        dismiss_workers(each)
    forget_loaders()


def begun():
    variables = Variables()
    variables.begin()
    return variables


def epoch(loader, seed):
    """Return the batches of an epoch, and the next random number."""
    torch.manual_seed(seed)
    batches = [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]
    return batches, torch.rand(1).item()


ORDERS = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled by its own generator": lambda: {"shuffle": True, "generator": torch.Generator()},
    "drawn before the seed": lambda: {"sampler": Eager()},
    "torchdata's": lambda: {"kind": StatefulDataLoader},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_step_that_is_undone_makes_them_again(made, order):
    loader = made(**ORDERS[order]())
    variables = begun()
    before = variables.take()
    state = loader.generator and loader.generator.get_state()
    first = epoch(loader, 3)
    variables.put(before)
    assert not has_workers(loader)
    if loader.generator is not None:
        loader.generator.set_state(state)
    assert epoch(loader, 3) == first


@pytest.mark.parametrize("order", ORDERS)
def test_another_process_makes_them_without_a_draw(made, order):
    loader = made(**ORDERS[order]())
    variables = begun()
    epoch(loader, 3)
    taken = variables.take()
    state = loader.generator and loader.generator.get_state()
    second, third = epoch(loader, 4), epoch(loader, 5)
    dismiss_workers(loader)  # as in a replacement
    variables.put(taken)
    if loader.generator is not None:
        loader.generator.set_state(state)
    assert workers_of(loader) is not None
    assert (epoch(loader, 4), epoch(loader, 5)) == (second, third)


def test_loaders_are_told_apart_by_the_order_in_which_they_were_made(made):
    first, second, third = made(), made(), made()
    variables = begun()
    epoch(second, 1)
    taken = variables.take()
    epoch(third, 1)
    dismiss_workers(second)
    variables.put(taken)
    assert [workers_of(each) is not None for each in (first, second, third)] == [False, True, False]


def test_a_loader_of_the_loop_that_another_process_lacks_is_refused(made):
    variables = begun()
    late = made()
    epoch(late, 1)
    taken = variables.take()
    variables.put(taken)
    assert has_workers(late)
    forget_loaders()
    with pytest.raises(RefusedError, match=r"made after the loop had begun.*\nMake it before job\.steps\(\)"):
        variables.put(taken)


def test_a_loader_of_the_loop_that_has_ended_is_not_missed(made):
    variables = begun()
    epoch(DataLoader(Numbers(), 2, num_workers=1, persistent_workers=True), 1)
    taken = variables.take()
    forget_loaders()
    variables.put(taken)


def draw(_worker):
    torch.rand(3)


NOISE = {
    "a dataset": {"dataset": Noise, "workers": 2},
    "a stream": {"dataset": Stream, "collate_fn": list},
    "workers that begin with a function": {"dataset": Noise, "worker_init_fn": draw},
    "workers that are not forked": {"dataset": Noise, "multiprocessing_context": "spawn"},
}


def undone_and_repeated(variables, loader, seed):
    """Return what an epoch gives, and what it gives again."""
    before = variables.take()
    first = epoch(loader, seed)
    variables.put(before)
    return first, epoch(loader, seed)


def elsewhere(variables, loader):
    """Return what three epochs give, and what the last two give in a process that begins with the second."""
    first = epoch(loader, 3)
    taken = variables.take()
    second, third = epoch(loader, 3), epoch(loader, 3)
    dismiss_workers(loader)  # as in a replacement
    variables.put(taken)
    return (first, second, third), (epoch(loader, 3), epoch(loader, 3))


@pytest.mark.parametrize("noise", NOISE)
def test_an_epoch_that_is_undone_has_the_same_noise(made, noise):
    loader = made(**NOISE[noise])
    variables = begun()
    for seed in (4, 5):
        first, again = undone_and_repeated(variables, loader, seed)
        assert again == first


@pytest.mark.parametrize("noise", NOISE)
def test_the_workers_of_another_process_draw_the_same_noise(made, noise):
    loader = made(**NOISE[noise])
    epochs, again = elsewhere(begun(), loader)
    assert again == epochs[1:]
    assert len(set(map(str, epochs))) == len(epochs)


def test_the_first_epoch_draws_as_without_us(made):
    assert epoch(made(dataset=Noise), 3) == epoch(DataLoader(Noise(), 2, num_workers=1), 3)


def test_an_epoch_that_ends_early_does_not_change_the_next(made):
    loader = made(dataset=Noise, workers=2)
    epochs = [epoch(loader, 3)]
    next(iter(loader))
    epochs.append(epoch(loader, 3))
    dismiss_workers(loader)
    assert [epoch(loader, 3), epoch(loader, 3), epoch(loader, 3)][::2] == epochs
