"""Variables in places where scripts seldom have any: wrappers, frozen models, classes inside others, bound methods, data sets."""

import itertools
import random
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit.taken import Taken
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from deadpool_run.worker.variables.variables import Variables

STEPS = 5
__hidden = 0


@pytest.fixture(scope="module", autouse=True)
def _group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(make, taken, *, until, and_then=0):
    """Call the function from `make` in each step. Restore the snapshot in `taken`, or take one if there is none. Return the next results."""
    variables = Variables()
    bump, *protected = make()
    parts = [
        (f"protected {number}{path}", each) for number, model in enumerate(protected) for path, each in inside(model)
    ]
    variables.begin(protected, parts)
    if until == 0 and not taken:
        taken.append(variables.take())
    for step in range(until + and_then):
        bump()
        if step == until - 1 and not taken:
            taken.append(variables.take())
        else:
            variables.take()
    variables.put(taken[0])
    return bump(), bump(), variables.too_large


def inside(model):
    return [(f".{path}" if path else "", each) for path, each in model.named_modules()]


def wrapper():
    model = DistributedDataParallel(nn.Linear(1, 1))
    model.updates, model.seen = 0, []

    def bump():
        model.updates += 1
        model.seen.append(model.updates)
        model.best = 2 * model.updates
        return model.updates, list(model.seen), model.best

    return bump, model


def frozen_teacher():
    teacher = nn.Sequential(nn.Linear(1, 1), nn.ReLU()).requires_grad_(requires_grad=False)
    teacher.used = 0

    def bump():
        teacher.used += 1
        teacher[1].scale = 2 * teacher.used
        return teacher.used, teacher[1].scale

    return (bump,)


def weakly_by_module():
    """Notes of hooks on modules, and objects that are found by number and not kept alive."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    norms, by_number, seen = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary({0: model}), weakref.WeakSet()

    def bump():
        norms[model[0]] = norms.get(model[0], 0) + 1
        norms[model[1]] = norms.get(model[1], 0) + norms[model[0]]
        by_number[len(by_number)] = model[0]
        seen.add(model[len(norms) - 1])
        return [norms[each] for each in model if each in norms], sorted(by_number), len(seen)

    return bump, model


class Outer:
    class Inner:
        count = 0

        class Innermost:
            count = 0

    def bump(self):
        self.Inner.count += 1
        self.Inner.Innermost.count += 2
        return self.Inner.count, self.Inner.Innermost.count


def nested_class():
    Outer.Inner.count = Outer.Inner.Innermost.count = 0
    outer = Outer()
    return (outer.bump,)


def counting_class(start):
    calls = 0

    class Counting:
        count = start

        @property
        def calls(self):
            nonlocal calls
            calls += 1
            return calls

    return Counting


def class_of_a_factory():
    one, others = counting_class(0)(), [counting_class(10)()]

    def bump():
        type(one).count += 1
        type(others[0]).count += 2
        return type(one).count, type(others[0]).count, one.calls, others[0].calls

    return (bump,)


def class_of_a_protected_model():
    class Net(nn.Linear):
        count = 0

        def forward(self, values):
            type(self).count += 1
            return super().forward(values)

    model = Net(1, 1)

    def bump():
        model(torch.ones(1))
        return type(model).count

    return bump, model


def hidden_global():
    global __hidden  # noqa: PLW0603 - as scripts do
    __hidden = 0

    def bump():
        global __hidden  # noqa: PLW0603 - as above
        __hidden += 1
        return __hidden

    return (bump,)


def methods_in_c():
    draw, number = random.Random(5).random, itertools.count(3).__next__
    normal, uniform = np.random.default_rng(1).normal, np.random.RandomState(2).rand
    seen = []
    note, count = seen.append, seen.__len__

    def bump():
        note(number())
        return draw(), normal(), uniform(), count(), list(seen)

    return (bump,)


def method_in_c_of_a_container():
    def made():
        return [].append, {}.__setitem__

    add, put = made()

    def bump():
        add(1)
        put(len(add.__self__), 2)
        return len(add.__self__), len(put.__self__)

    return (bump,)


class Dice(random.Random):
    rolled = 0

    def roll(self):
        self.rolled += 1
        return self.randrange(1 << 30), self.gauss(0, 1), self.rolled


def own_generators():
    dice, rolls = Dice(3), {"a": 0, "dice": [Dice(4)]}
    later = None

    def bump():
        nonlocal later
        later = later or Dice(5)
        return dice.roll(), rolls["dice"][0].roll(), later.roll()

    return (bump,)


def spawned_generators():
    parent, seeds = np.random.default_rng(7), np.random.SeedSequence(8)

    def bump():
        return parent.spawn(1)[0].random(), parent.random(), np.random.default_rng(seeds.spawn(1)[0]).random()

    return (bump,)


def tensors_of_a_dataset():
    data = TensorDataset(torch.zeros(4, 2), torch.arange(4))
    loader = DataLoader(Subset(data, [1, 2]))

    def bump():
        data.tensors[0].add_(1)
        return [float(values.sum()) for values, _ in loader]

    return (bump,)


class Growing(Dataset):
    def __init__(self):
        self.asked, self.tensors = 0, [torch.zeros(2)]

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.asked += 1
        self.tensors[0] += 1
        return self.asked + float(self.tensors[0].sum())


def parts_of_a_loader():
    collated = 0

    def collate(values):
        nonlocal collated
        collated += 1
        return collated, values

    loader, sharded = DataLoader(Growing(), collate_fn=collate), DistributedSampler(range(9), 1, 0)

    def bump():
        sharded.set_epoch(sharded.epoch + 1)
        return list(loader), list(sharded)

    return (bump,)


def order_of_a_set():
    pending, words = set(range(99)), {"b", "a", "c"}

    def bump():
        return pending.pop(), list(pending), list(words)

    return (bump,)


PLACES = [
    wrapper,
    frozen_teacher,
    weakly_by_module,
    nested_class,
    class_of_a_factory,
    class_of_a_protected_model,
    hidden_global,
    methods_in_c,
    method_in_c_of_a_container,
    own_generators,
    spawned_generators,
    tensors_of_a_dataset,
    parts_of_a_loader,
    order_of_a_set,
]


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("until", [0, 1, STEPS])
def test_a_survivor_repeats_with_what_it_had(make, until):
    expected = run(make, Taken(), until=until)
    assert run(make, Taken(), until=until, and_then=1) == expected


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("rehearsed", [0, 2, STEPS + 1])
def test_a_replacement_goes_on_with_what_the_lost_rank_had(make, rehearsed):
    taken = Taken()
    expected = run(make, taken, until=STEPS)
    assert run(make, taken, until=rehearsed) == expected
