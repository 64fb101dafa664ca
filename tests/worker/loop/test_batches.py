"""A loader that is put back gives exactly the batches that are left, from the same generators, and loads no others."""

import copy
import dataclasses
import itertools
import os
import random
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from deadpool_run.errors import RefusedError, ScriptError
from deadpool_run.worker.loop import worker_seeds
from deadpool_run.worker.loop.batches import Batches, refuse_shared
from deadpool_run.worker.state.generators import search
from deadpool_run.worker.state.rng import put_rng, take_rng

sys.path.append(str(Path(__file__).parents[2] / "loops" / "scripts"))

import items_data
from items_data import BATCH, PER_EPOCH

SIZE = PER_EPOCH * BATCH


class Counted(Dataset):
    """Notes what is loaded."""

    def __init__(self):
        self.loaded = []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.loaded.append(int(index))
        return int(index), torch.rand(()) + random.random()


def generated(dataset):
    return DataLoader(dataset, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


def persistent(dataset):
    generator = torch.Generator().manual_seed(4)
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=generator)


class Augmented(Counted):
    """A dataset with generators of its own, as in a transform."""

    def __init__(self):
        super().__init__()
        self.transforms = [{"flip": random.Random(1)}, np.random.default_rng(2), np.random.RandomState(3)]
        self.transforms.append(types.SimpleNamespace(generator=torch.Generator().manual_seed(4)))

    def __getitem__(self, index):
        first, second, third, last = self.transforms
        drawn = (
            first["flip"].random() + second.random() + third.rand() + float(torch.rand((), generator=last.generator))
        )
        return int(index), drawn


class Masked:
    """A `collate_fn` that draws."""

    def __init__(self):
        self.random = random.Random(5)

    def __call__(self, items):
        return torch.tensor([drawn + self.random.random() for _, drawn in items])


LOADERS = {
    "sequential": lambda dataset: DataLoader(dataset, BATCH),
    "shuffled": lambda dataset: DataLoader(dataset, BATCH, shuffle=True),
    "a generator": generated,
    "with replacement": lambda dataset: DataLoader(
        dataset, BATCH, sampler=torch.utils.data.RandomSampler(dataset, replacement=True)
    ),
    "weighted": lambda dataset: DataLoader(
        dataset, BATCH, sampler=torch.utils.data.WeightedRandomSampler(range(1, SIZE + 1), SIZE)
    ),
    "distributed": lambda dataset: DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, 1, 0, seed=5)),
    "no batches": lambda dataset: DataLoader(dataset, batch_size=None, shuffle=True),
    "a sampler that draws as it goes": lambda dataset: DataLoader(dataset, BATCH, sampler=items_data.Drawing()),
    "workers": lambda dataset: DataLoader(dataset, BATCH, shuffle=True, num_workers=2),
    "persistent workers": persistent,
    "workers with generators of their own": lambda _: DataLoader(
        Augmented(), BATCH, shuffle=True, num_workers=2, collate_fn=Masked()
    ),
    "stateful": lambda _dataset: items_data.Stateful(1),
}


def flat(batch):
    return [part.tolist() if torch.is_tensor(part) else part for part in batch]


def train(batches, steps):
    """Take batches, and draw from the generators between them as a training does."""
    return [(flat(batches.take()), batches.epoch, float(torch.rand(())), random.random()) for _ in range(steps)]


def seed(number):
    torch.manual_seed(number)
    random.seed(number)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("done", [3, PER_EPOCH, PER_EPOCH + 2])
def test_another_process_goes_on_where_the_first_stood(kind, done):
    steps = 3 * PER_EPOCH
    seed(1)
    first = Batches(LOADERS[kind](Counted()))
    train(first, done)
    place, states = first.state_dict(), take_rng()
    want = train(first, steps - done)

    seed(2)
    replacement = Batches(LOADERS[kind](Counted()))
    train(replacement, 2)  # the rehearsal
    replacement.load_state_dict(place)
    put_rng(states)
    assert train(replacement, steps - done) == want


@pytest.mark.parametrize("kind", LOADERS)
def test_a_survivor_repeats_steps(kind):
    seed(1)
    batches = Batches(LOADERS[kind](Counted()))
    train(batches, 1)  # nobody goes back to the beginning
    told = [(batches.state_dict(), take_rng(), train(batches, 1)) for _ in range(2 * PER_EPOCH)]
    batches.state_dict()
    for (place, states, want), back in itertools.product(told[::-1], (1, 2)):
        batches.load_state_dict(place)
        put_rng(states)
        assert train(batches, 1) == want, f"repeated {back} times from epoch and batch {place['epoch'], place['done']}"


def test_what_is_skipped_is_not_loaded():
    dataset = Counted()
    batches = Batches(generated(dataset))
    train(batches, PER_EPOCH + 3)
    place = batches.state_dict()
    replacement = Counted()
    other = Batches(generated(replacement))
    other.load_state_dict(place)
    assert replacement.loaded == dataset.loaded, "the dataset's attributes are not restored"
    train(other, PER_EPOCH - 3)
    assert sorted(replacement.loaded[SIZE:]) == list(range(SIZE)), "not each sample of the epoch once"


def test_a_batch_that_was_changed_is_loaded_again():
    batches = Batches(persistent(Counted()))
    batches.take()
    place = batches.state_dict()
    numbers, x = batches.take()
    want = x.clone()
    batches.load_state_dict(place)
    again, same = batches.take()
    assert same is x, "a whole batch is not loaded again"
    assert again is numbers
    x.zero_()
    batches.load_state_dict(place)
    assert torch.equal(batches.take()[1], want)


def test_a_loop_over_the_loader_itself_has_the_same_order():
    seed(1)
    loader = DataLoader(Counted(), BATCH, shuffle=True)
    want = [flat(batch) for _ in range(2) for batch in loader]
    seed(1)
    batches = Batches(DataLoader(Counted(), BATCH, shuffle=True))
    assert [flat(batches.take()) for _ in range(2 * PER_EPOCH)] == want


def test_the_loader_stays_the_users_own():
    dataset = Counted()
    loader = DataLoader(dataset, BATCH)
    sampler = loader.batch_sampler
    Batches(loader).take()
    assert loader.batch_sampler is sampler
    assert [flat(batch)[0] for batch in loader] == [list(range(i, i + BATCH)) for i in range(0, SIZE, BATCH)]


@pytest.mark.parametrize("loader", [DataLoader(items_data.Stream(), BATCH), [1, 2, 3], iter([1])])
def test_what_cannot_be_put_back_is_refused(loader):
    with pytest.raises(ScriptError, match=r"(?s)cannot continue in the middle.*\nAdd state_dict.*replay=True"):
        Batches(loader)


def test_a_loader_without_a_length_needs_steps():
    with pytest.raises(ScriptError, match=r"has no len.*\nPass steps"):
        Batches(DataLoader(items_data.Stream(), BATCH), replay=True).per_epoch()


def test_of_what_workers_draw_and_their_loader_does_not_keep_is_warned():
    with pytest.warns(RuntimeWarning, match="does not hold the random state of its workers"):
        Batches(StatefulDataLoader(Counted(), BATCH, num_workers=1))
    Batches(StatefulDataLoader(Counted(), BATCH))  # in the main process the generators are protected


def test_loaders_that_share_what_a_position_is_made_of_are_refused():
    dataset, generator = Counted(), torch.Generator()
    sampler = DistributedSampler(dataset, 1, 0)
    sharing = [
        ("DataLoader", [DataLoader(dataset, BATCH)] * 2),
        ("DistributedSampler", [DataLoader(dataset, BATCH, sampler=sampler) for _ in range(2)]),
        ("Generator", [DataLoader(dataset, BATCH, shuffle=True, generator=generator) for _ in range(2)]),
    ]
    for shared, loaders in sharing:
        with pytest.raises(ScriptError, match=rf"two loaders share a {shared}.*\nGive each"):
            refuse_shared(loaders)
    refuse_shared([generated(dataset), generated(dataset), DataLoader(dataset, BATCH, shuffle=True)])


def test_an_empty_loader_is_refused():
    with pytest.raises(ScriptError, match="no batch"):
        Batches([], replay=True).take()


class Lazy(Counted):
    """Makes its generator with the first item."""

    random = None

    def __getitem__(self, index):
        self.random = self.random or random.Random(1)
        return self.random.random()


class Seen(Counted):
    """Counts what it loads."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __getitem__(self, index):
        self.count += 1
        return self.count


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Lazy, "the dataset makes a generator of random numbers while a worker loads"),
        (Seen, "the dataset changes Seen.count while a worker loads"),
    ],
)
def test_what_a_worker_changes_is_warned_of(dataset, text, capfd, monkeypatch):
    # pytest records warnings, also in a worker, where nobody reads them.
    monkeypatch.setattr(worker_seeds, "warn", lambda text: os.write(2, text.encode()))
    batches = Batches(DataLoader(dataset(), BATCH, num_workers=1))
    for _ in range(PER_EPOCH):
        batches.take()
    del batches
    assert capfd.readouterr().err.count(text) == 1


def test_generators_are_found_in_a_fixed_order():
    dataset = Augmented()
    dataset.secret, dataset.itself = random.SystemRandom(), dataset
    kinds = [type(each).__name__ for each in search(dataset).generators]
    assert sorted(kinds) == ["Generator", "Generator", "Random", "RandomState"]
    assert [type(each).__name__ for each in search(Augmented()).generators] == kinds


class Noise(Dataset):
    def __len__(self):
        return 2 * BATCH

    def __getitem__(self, index):
        return torch.rand(())


def test_persistent_workers_draw_other_numbers_in_each_epoch_and_for_each_loader():
    """Nothing is drawn from the global generators between their epochs."""
    loaders = [
        DataLoader(Noise(), BATCH, sampler=DistributedSampler(Noise(), 1, 0), num_workers=1, persistent_workers=True)
        for _ in range(2)
    ]
    sources = [Batches(loader, number=number) for number, loader in enumerate(loaders)]
    drawn = [tuple(batch.tolist()) for _ in range(6) for batch in (source.take() for source in sources)]
    assert len(set(drawn)) == len(drawn)


class Rising(Sampler):
    """Reads an attribute for each index, which the script changes."""

    def __init__(self):
        self.first = 0

    def __len__(self):
        return 40

    def __iter__(self):
        return (self.first + n for n in range(40))


class Shards(IterableDataset):
    """Shuffles each shard when it begins, with a generator that the script uses, too."""

    def __iter__(self):
        for start in range(0, 32, 8):
            order = list(range(start, start + 8))
            random.shuffle(order)
            yield from order


def repeated(batches, *, at, change=lambda _: None):
    """Take 16 batches, and repeat one as a replacement would. Returns them."""
    found = []
    while len(found) < 16:
        place, states = copy.deepcopy(batches.state_dict()), take_rng()
        batch = batches.take().tolist()
        if len(found) == at:
            at = None
            batches._kept.clear()
            batches._next = None
            batches.load_state_dict(place)
            put_rng(states)
            continue
        found.append((batch, random.random()))
        change(len(found))
    return found


@pytest.mark.parametrize("at", [*range(5, 15), None])
def test_indices_that_workers_got_in_advance_are_the_same_or_the_job_stops(at):
    sampler = Rising()
    batches = Batches(DataLoader(range(1000), 1, sampler=sampler, num_workers=1, prefetch_factor=4))
    change = lambda step: setattr(sampler, "first", 100 if step >= 5 else 0)  # noqa: E731
    try:
        numbers = [number for (number,), _ in repeated(batches, at=at, change=change)]
    except RefusedError:
        assert at is not None
    else:
        assert numbers == [*range(9), *range(109, 116)]


@dataclasses.dataclass
class Encoded:
    numbers: torch.Tensor

    def tolist(self):
        return self.numbers.tolist()


class Rows:
    """Batches of objects and arrays, which are drawn late, and of nested tensors."""

    def __iter__(self):
        for number in range(16):
            drawn = random.random()
            yield (Encoded(torch.tensor([drawn])), np.array([drawn]), torch.nested.nested_tensor([torch.ones(1)]))[
                number % 3
            ]


@pytest.mark.parametrize("at", [*range(3, 12)])
def test_objects_and_arrays_that_are_read_again_are_compared(at):
    seed(1)
    batches = Batches(Rows(), replay=True)
    train_on = [batches.take() for _ in range(at)]
    place, states = copy.deepcopy(batches.state_dict()), take_rng()
    random.random()
    batches.load_state_dict(place)
    batches._next = None
    put_rng(states)
    place["begun"]["global"]["python"] = take_rng()["python"]  # as if training had drawn between
    batches.load_state_dict(place)
    with pytest.raises(RefusedError, match="gave other batches"):
        batches.take()
    assert len(train_on) == at


@pytest.mark.parametrize("at", [*range(15), None])
def test_batches_that_are_read_again_are_the_same_or_the_job_stops(at):
    def run(at):
        seed(1)
        return repeated(Batches(DataLoader(Shards(), 2), replay=True), at=at)

    try:
        found = run(at)
    except RefusedError:
        assert at > 3  # within the first shard nothing is drawn late
    else:
        assert found == run(None)
