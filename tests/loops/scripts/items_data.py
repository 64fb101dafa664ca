"""Items with different sources of batches: `Job.batches`, with epochs of five batches per rank."""

import random

import numpy as np
import torch
from items_variables import IMPORTED
from kit_loops import WIDTH, Loop, adam, blocks_of, data, ddp, item, net
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

BATCH = 4
PER_EPOCH = 5


class Samples(Dataset):
    """Samples that show their index, with noise of every generator if `noisy`."""

    def __init__(self, size, *, noisy=True):
        self.size = size
        self.noisy = noisy

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        fixed = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        if not self.noisy:
            return index, fixed
        noise = torch.rand(()) + random.random() + float(np.random.rand())  # noqa: NPY002
        return index, fixed + 0.1 * noise


def fed(rank, *loaders, **how):
    model = ddp(net(2))
    optimizer = adam(model)

    def each(batch):
        return batch if len(loaders) > 1 else (batch,)

    def step(_index, batch):
        sum(model(x) * sign for sign, (_, x) in zip((1, -1), each(batch), strict=False)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(
        {"model": model, "optimizer": optimizer},
        step,
        blocks_of(model),
        optimizer,
        steps=lambda job, total: job.batches(*loaders, steps=total, **how),
        told=lambda step, batch: [step.epoch, *(indices.tolist() for indices, _ in each(batch))],
    )


@item("Job.batches: shuffled")
def shuffled(rank, _size):
    return fed(rank, DataLoader(Samples(PER_EPOCH * BATCH), BATCH, shuffle=True))


@item("Job.batches: DistributedSampler, workers")
def distributed(rank, size):
    samples = Samples(PER_EPOCH * BATCH * size)
    sampler = DistributedSampler(samples, size, rank, seed=7)
    return fed(rank, DataLoader(samples, BATCH, sampler=sampler, num_workers=2))


@item("Job.batches: shuffled, persistent workers, a generator")
def persistent(rank, _size):
    generator = torch.Generator().manual_seed(rank)
    loader = DataLoader(
        Samples(PER_EPOCH * BATCH), BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=generator
    )
    return fed(rank, loader)


@item("Job.batches: a batch sampler over a weighted sampler")
def weighted(rank, _size):
    sampler = WeightedRandomSampler([1 + index for index in range(PER_EPOCH * BATCH)], PER_EPOCH * BATCH)
    batches = BatchSampler(sampler, BATCH, drop_last=True)
    return fed(rank, DataLoader(Samples(PER_EPOCH * BATCH), batch_sampler=batches))


class Drawing(Sampler):
    """A sampler that draws from the global generators during training."""

    def __len__(self):
        return PER_EPOCH * BATCH

    def __iter__(self):
        for _ in range(len(self)):
            yield int(torch.randint(0, 10, ())) + random.randrange(10)


@item("Job.batches: a sampler of the script's own")
def own_sampler(rank, _size):
    return fed(rank, DataLoader(Samples(PER_EPOCH * BATCH), BATCH, sampler=Drawing()))


class Harder(Samples):
    """Samples with noise whose strength the script changes."""

    strength = 0.0

    def __getitem__(self, index):
        fixed = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return index, fixed + self.strength * random.random()


@item("Job.batches: a weighted sampler and a dataset that change in each step, workers, one generator")
def changing(rank, _size):
    samples, generator = Harder(PER_EPOCH * BATCH), torch.Generator().manual_seed(rank)
    sampler = WeightedRandomSampler(torch.ones(len(samples)), len(samples), generator=generator)
    loop = fed(rank, DataLoader(samples, BATCH, sampler=sampler, num_workers=1))
    train = loop.step

    def step(index, batch):
        train(index, batch)
        samples.strength = 0.1 * index
        sampler.weights[batch[0]] = 1 + index + torch.rand((), generator=generator).double()

    loop.step = step
    return loop


class Stateful:
    """A loader that restores its position, without torchdata."""

    def __init__(self, rank):
        self._samples = Samples(PER_EPOCH * BATCH)
        self._generator = torch.Generator().manual_seed(rank)
        self._order, self._next, self._loaded = [], 0, False

    def __len__(self):
        return PER_EPOCH

    def __iter__(self):
        if not self._loaded:
            sampler = RandomSampler(self._samples, generator=self._generator)
            self._order, self._next = list(BatchSampler(sampler, BATCH, drop_last=True)), 0
        self._loaded = False
        while self._next < len(self._order):
            self._next += 1
            found = [self._samples[index] for index in self._order[self._next - 1]]
            yield torch.tensor([index for index, _ in found]), torch.stack([x for _, x in found])

    def state_dict(self):
        return {"order": self._order, "next": self._next, "generator": self._generator.get_state()}

    def load_state_dict(self, state):
        self._order, self._next, self._loaded = state["order"], state["next"], True
        self._generator.set_state(state["generator"])


@item("Job.batches: a loader with state_dict")
def stateful(rank, _size):
    return fed(rank, Stateful(rank))


@item("Job.batches: torchdata's StatefulDataLoader, shuffled, workers")
def torchdatas(rank, size):
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415 - the one item that needs it

    samples = Samples(PER_EPOCH * BATCH * size, noisy=False)  # no state_dict has its workers' generators
    sampler = DistributedSampler(samples, size, rank, seed=7)
    return fed(rank, StatefulDataLoader(samples, BATCH, sampler=sampler, num_workers=2))


class Stream(IterableDataset):
    def __iter__(self):
        samples = Samples(PER_EPOCH * BATCH)
        return (samples[index] for index in range(len(samples)))


@item("Job.batches: IterableDataset, replay=True")
def replayed(rank, _size):
    return fed(rank, DataLoader(Stream(), BATCH), replay=True)


@item("Job.batches: two loaders, the second one shorter and with workers")
def two(rank, size):
    samples = Samples(3 * BATCH * size)
    second = DataLoader(samples, BATCH, sampler=DistributedSampler(samples, size, rank, seed=7), num_workers=1)
    return fed(rank, DataLoader(Samples(PER_EPOCH * BATCH), BATCH, shuffle=True), second)


@item("an evaluation now and then, with a shuffled loader of its own with persistent workers, and noise in each step")
def evaluated(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    held_out = DataLoader(Samples(2 * BATCH, noisy=False), BATCH, shuffle=True, num_workers=1, persistent_workers=True)

    def step(index):
        if index >= IMPORTED and (index - IMPORTED) % 3 == 0:
            with torch.no_grad():
                assert all(model.module(x).isfinite().all() for _, x in held_out)
        model(data(index, rank) + 0.1 * torch.randn(1)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("each step is an epoch of the script's own loader, with noise from persistent workers")
def epochs(_rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    loader = DataLoader(Samples(2 * BATCH), BATCH, shuffle=True, num_workers=1, persistent_workers=True)

    def step(_index):
        sum(model(x) for _, x in loader).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)
