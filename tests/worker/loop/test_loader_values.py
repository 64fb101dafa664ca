"""A script may change its dataset, its samplers and their generators in the loop: a repair repeats the batches of an unfailed run."""

import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from deadpool_run.errors import RefusedError
from deadpool_run.worker.compat.loaders import note_loaders, set_workers, workers_of
from deadpool_run.worker.loop.batches import Batches
from deadpool_run.worker.state.generators import seed_epoch
from deadpool_run.worker.state.rng import put_rng, take_rng

BATCH, PER_EPOCH = 4, 5
SIZE = BATCH * PER_EPOCH
MANY = 4096
"""Elements. A tensor of so many is kept apart from the small ones."""


def weak(x):
    return x


def strong(x):
    return 100 * x


class Shift:
    """A transform with a strength."""

    def __init__(self):
        self.strength = 0.0


class Data(Dataset):
    """Samples that depend on the attributes of the dataset."""

    def __init__(self):
        self.noise, self.transform, self.table = 0.0, weak, torch.zeros(3)
        self.shift, self.parts = [Shift()], [("a", 0)]
        self.rng = np.random.default_rng(7)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, self.transform(index + self.noise + float(self.table[1])) + self.shift[0].strength + self.parts[
            0
        ][1]


class Noisy(Data):
    def __getitem__(self, index):
        return index, self.rng.random()


class Shuffled(Sampler):
    """Shuffles its own list once more in each epoch."""

    def __init__(self):
        self.order = list(range(SIZE))
        self.random = random.Random(3)

    def __len__(self):
        return SIZE

    def __iter__(self):
        self.random.shuffle(self.order)
        return iter(self.order)


class Popped(Shuffled):
    """Draws as it goes, from a list that it uses up."""

    def __iter__(self):
        self.left = list(self.order)
        while self.left:
            yield self.left.pop(self.random.randrange(len(self.left)))


class Stream(IterableDataset):
    """Goes on counting from epoch to epoch."""

    def __init__(self):
        self.count, self.noise = 0, 0.0

    def __len__(self):
        return SIZE

    def __iter__(self):
        for _ in range(SIZE):
            self.count += 1
            yield self.count, self.count + self.noise


def harder(loader, batches, _batch):
    data, epoch = loader.dataset, batches.epoch
    data.noise, data.transform, data.shift[0].strength = 0.5 * epoch, (weak, strong)[epoch % 2], 3.0 * epoch
    data.table[1], data.parts[0] = epoch, ("a", epoch)


def reweighted(loader, batches, batch):
    loader.sampler.weights[batch[0]] = (batch[0].double() + batches.epoch) % 5 + 0.1


def weighted(count, **options):
    sampler = WeightedRandomSampler(
        torch.ones(count), SIZE, replacement=False, generator=torch.Generator().manual_seed(3)
    )
    return DataLoader(Data(), BATCH, sampler=sampler, **options)


def drawn(loader, _batches, _batch):
    return float(torch.rand((), generator=loader.generator))


def shared(**options):
    return DataLoader(Data(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def all_of_it(loader, batches, batch):
    """Change the weights and the dataset with draws from the sampler's generator."""
    harder(loader, batches, batch)
    loader.sampler.weights[batch[0]] = 1 + torch.rand((), generator=loader.sampler.generator).double()


def left_alone(*_):
    """A loop that changes nothing."""


CASES = {
    "workers": (lambda: DataLoader(Data(), BATCH, num_workers=1), harder),
    "persistent workers": (lambda: DataLoader(Data(), BATCH, num_workers=1, persistent_workers=True), harder),
    "the main process": (lambda: DataLoader(Data(), BATCH, shuffle=True), harder),
    "weights": (lambda: weighted(SIZE), reweighted),
    "many weights": (lambda: weighted(MANY), reweighted),
    "weights and workers": (lambda: weighted(SIZE, num_workers=1), reweighted),
    "a list that is shuffled": (lambda: DataLoader(Data(), BATCH, sampler=Shuffled()), left_alone),
    "a list that is shuffled, workers": (
        lambda: DataLoader(Data(), BATCH, sampler=Shuffled(), num_workers=1),
        left_alone,
    ),
    "a list that is used up": (lambda: DataLoader(Data(), BATCH, sampler=Popped()), left_alone),
    "a list that is used up, workers": (lambda: DataLoader(Data(), BATCH, sampler=Popped(), num_workers=1), left_alone),
    "a generator that the script uses": (shared, drawn),
    "a generator that the script uses, workers": (lambda: shared(num_workers=1), drawn),
    "weights from a generator that the script uses": (lambda: weighted(SIZE, num_workers=1), all_of_it),
    "a generator of the dataset": (lambda: DataLoader(Noisy(), BATCH), left_alone),
    "a stream": (lambda: DataLoader(Stream(), BATCH), left_alone),
}


def flat(batch):
    return [part.tolist() for part in batch]


def train(loader, batches, change, steps):
    """Take batches, change the loader's objects, and draw as a training does."""
    told = []
    for _ in range(steps):
        batch = batches.take()
        told.append((flat(batch), batches.epoch, change(loader, batches, batch), float(torch.rand(()))))
    return told


def started(case):
    make, change = CASES[case]
    torch.manual_seed(1)
    loader = make()
    return loader, Batches(loader, replay=True), change


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("done", [3, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH + 1])
def test_a_replacement_repeats_what_the_script_has_changed(case, done):
    loader, batches, change = started(case)
    train(loader, batches, change, done)
    place, states = batches.state_dict(), take_rng()
    want = train(loader, batches, change, 3 * PER_EPOCH - done)

    loader, batches, change = started(case)
    train(loader, batches, change, 2)  # the rehearsal
    batches.load_state_dict(place)
    put_rng(states)
    assert train(loader, batches, change, 3 * PER_EPOCH - done) == want


@pytest.mark.parametrize("case", CASES)
def test_a_survivor_repeats_steps_in_which_the_script_changed_something(case):
    loader, batches, change = started(case)
    train(loader, batches, change, 1)
    told = [(batches.state_dict(), take_rng(), train(loader, batches, change, 1)) for _ in range(2 * PER_EPOCH)]
    for place, states, want in told[::-1]:
        batches.load_state_dict(place)
        put_rng(states)
        assert train(loader, batches, change, 1) == want, f"epoch {place['epoch']}, batch {place['done']}"


def test_the_scripts_own_objects_stay_in_their_places():
    loader, batches, change = started("weights")
    weights = loader.sampler.weights
    train(loader, batches, change, PER_EPOCH + 2)
    place, present = batches.state_dict(), weights.clone()
    train(loader, batches, change, 1)
    batches.load_state_dict(place)
    assert torch.equal(weights, present)
    batches.take()
    assert loader.sampler.weights is weights
    assert torch.equal(weights, present), "the weights of the epoch's start are still there"


class Table(Data):
    """A dataset with a table that is too large to be kept."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(1 << 19)


class Unsteady(Shuffled):
    def __iter__(self):
        return iter([byte % SIZE for byte in os.urandom(SIZE)])


def test_data_that_is_not_kept_and_has_changed_within_the_epoch_is_refused():
    def made():
        loader = DataLoader(Table(), BATCH, num_workers=1)
        return loader, Batches(loader)

    loader, batches = made()
    train(loader, batches, left_alone, 2)
    unchanged = batches.state_dict()
    train(loader, batches, lambda *_: loader.dataset.table.add_(1), 2)
    changed = batches.state_dict()
    train(loader, batches, left_alone, 1)
    for again in (batches, made()[1]):  # a survivor's, and a replacement's
        again.load_state_dict(changed)
        again._kept.clear()
        with pytest.raises(RefusedError, match=r"dataset\.table .*larger than 1 MiB.*\nChange it before the loop"):
            again.take()
    _, again = made()
    again.load_state_dict(unchanged)
    again.take()


def test_data_that_persistent_workers_had_and_that_is_not_kept_is_refused():
    note_loaders(seed_epoch)

    def made():
        loader = DataLoader(Table(), BATCH, num_workers=1, persistent_workers=True)
        return loader, Batches(loader)

    loader, batches = made()
    loader.dataset.table.add_(1)
    train(loader, batches, left_alone, 2)
    place, workers = batches.state_dict(), workers_of(loader)
    loader, again = made()
    set_workers(loader, workers)  # as the script's variables do
    again.load_state_dict(place)
    with pytest.raises(RefusedError, match=r"dataset\.table .*larger than 1 MiB.*\nChange it before the loop"):
        again.take()


def test_an_order_that_cannot_be_repeated_is_refused():
    batches = Batches(DataLoader(Data(), BATCH, sampler=Unsteady()))
    batches.take()
    place = batches.state_dict()
    batches.take()
    batches.load_state_dict(place)
    with pytest.raises(
        RefusedError, match=r"order of epoch 0 cannot be repeated.*Unsteady drew other.*\nLet the order"
    ):
        batches.take()


def test_a_loader_that_does_not_change_adds_nothing_to_a_snapshot():
    loader, batches, _ = started("persistent workers")
    train(loader, batches, left_alone, 3)
    state = batches.state_dict()
    assert state["values"] == state["begun"]["values"] == {}


def test_a_state_of_an_earlier_version_is_loaded():
    loader, batches, _ = started("the main process")
    train(loader, batches, left_alone, 2)
    place = batches.state_dict()
    want = train(loader, batches, left_alone, 1)
    older = {name: place[name] for name in ("epoch", "done", "loader")}
    older["begun"] = {name: place["begun"][name] for name in ("global", "own")} | {"anew": True}
    loader, batches, _ = started("the main process")
    batches.load_state_dict(older)
    assert train(loader, batches, left_alone, 1)[0][0] == want[0][0]
