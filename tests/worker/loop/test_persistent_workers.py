"""Whether a loader has persistent workers is state: to make them draws a random number, and to use them again does not."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from deadpool_run.errors import RefusedError
from deadpool_run.worker.compat.loaders import dismiss_workers, forget_loaders, has_workers, note_loaders
from deadpool_run.worker.variables.variables import Variables


class Numbers(Dataset):
    """Eight numbers."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class Eager(torch.utils.data.Sampler):
    """Draws before its first index, and so before the seed of the workers."""

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.randperm(8).tolist())


@pytest.fixture
def made():
    """Make loaders with persistent workers, and end these after the test."""
    note_loaders()
    forget_loaders()
    found = []

    def make(kind=DataLoader, **options):
        found.append(kind(Numbers(), 2, num_workers=1, persistent_workers=True, **options))
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
    batches = [batch.tolist() for batch in loader]
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
    assert has_workers(loader)
    assert (epoch(loader, 4), epoch(loader, 5)) == (second, third)


def test_loaders_are_told_apart_by_the_order_in_which_they_were_made(made):
    first, second, third = made(), made(), made()
    variables = begun()
    epoch(second, 1)
    taken = variables.take()
    epoch(third, 1)
    dismiss_workers(second)
    variables.put(taken)
    assert [has_workers(each) for each in (first, second, third)] == [False, True, False]


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
