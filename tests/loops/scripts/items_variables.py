"""Items that carry state from step to step in variables of the script, with an effect at once or only later."""

import decimal
import enum
import functools
import itertools
import math
import multiprocessing
import os
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from items_steps import sharded
from kit_loops import BATCH, WIDTH, Loop, adam, blocks_of, data, ddp, item, net, update
from torch import nn

LATER = 4
"""From this step on, the collected state has an effect."""
IMPORTED = 5
"""A rank dies in this step."""
RATES = {}
"""Rates that a module registers when it is imported."""
TOTAL = 0


@item("counters, averages and lists in variables, some used only later")
def in_variables(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    count, average, norms, seen = 0, 1.0, [], set()

    def step(index):
        global TOTAL  # noqa: PLW0603 - as scripts do
        nonlocal count, average
        loss = model(data(index, rank)).pow(2).mean()
        (loss / average).backward()
        limit = sorted(norms)[len(norms) // 2] if len(norms) >= LATER else 1e3
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        count += 1
        TOTAL += BATCH
        seen.add(index // 2)
        average = 0.9 * average + 0.1 / (1 + index)
        later = count + TOTAL + len(seen) if count > LATER else 0
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + later)
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@dataclass(slots=True)
class Tracker:
    """A small object with state, as scripts have them."""

    count: int = 0
    recent: deque = field(default_factory=lambda: deque(maxlen=3))
    best: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(loss=float("inf"), step=-1))

    def add(self, index, loss):
        self.count += 1
        self.recent.append(loss)
        if loss < self.best.loss:
            self.best = SimpleNamespace(loss=loss, step=index)

    def rate(self):
        return 1e-2 * (1 + sum(self.recent)) / (1 + self.best.step + self.count)


@item("objects, dicts and generators of the script's own")
def in_objects(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    tracker, words = Tracker(), Counter()
    setup = {"model": model, "rate": 1.0, "tracker": tracker}
    generators = torch.Generator().manual_seed(rank), random.Random(rank), np.random.default_rng(rank)

    def step(index):
        noise = torch.rand(BATCH, WIDTH, generator=generators[0]) + generators[1].random() + generators[2].random()
        setup["model"](data(index, rank) + 0.1 * noise).pow(2).mean().backward()
        setup["tracker"].add(index, 1 / (1 + index % 3))
        setup["rate"] *= 0.9
        words[f"{index % 2}"] += 1
        optimizer.param_groups[0]["lr"] = tracker.rate() * setup["rate"] * words["0"]
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("the next batch is fetched in the step (nanoGPT), into a variable")
def fetched_ahead(_rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    batch = torch.randn(BATCH, WIDTH)

    def step(_index):
        nonlocal batch
        loss = model(batch).pow(2).mean()
        batch = torch.randn(BATCH, WIDTH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


class Annealed(nn.Module):
    """A block that counts its calls and keeps a mean in plain attributes."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.calls, self.mean = 0, torch.zeros(WIDTH)

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.inner(x - self.mean) * (1.0 if self.calls <= LATER else 2.0 / self.calls)


@item("modules count calls and keep means in plain attributes")
def in_modules(rank, _size):
    model = ddp(Annealed())
    optimizer = adam(model)
    step = update(model, optimizer, rank)
    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model.module.inner), optimizer)


class Ring:
    """A ring buffer of experience, too large for the part of a snapshot outside tensors."""

    def __init__(self):
        self.rows, self.weights, self.n = torch.zeros(4000, WIDTH), np.zeros((4000, 20)), 0

    def add(self, rows):
        for row in rows:
            self.rows[self.n % len(self.rows)] = row
            self.weights[self.n % len(self.weights)] = 1 / (1 + self.n)
            self.n += 1

    def sample(self, source):
        chosen = [source.randrange(min(self.n, len(self.rows))) for _ in range(BATCH)]
        return self.rows[chosen] * torch.from_numpy(self.weights[chosen, :1]).float()


@item("the best weights in a file of rank 0, gone back to by all ranks")
def best_in_a_file(rank, _size):
    """A replacement's first steps, and the end of a step that a loss has interrupted, must not write the file."""
    model = ddp(net())
    optimizer = adam(model)
    train, best = update(model, optimizer, rank), math.inf
    file = Path(multiprocessing.current_process()._config["tempdir"], "best.pt")

    def step(index):
        nonlocal best
        train(index)
        value = sum(each.detach().abs().sum() for each in model.parameters())
        dist.all_reduce(value)
        if value.item() < best:
            best = value.item()
            if rank == 0:
                draft = file.with_suffix(".draft")
                torch.save((model.state_dict(), optimizer.state_dict()), draft)
                draft.replace(file)
        elif index % 3 == 2:
            dist.barrier()
            weights, state = torch.load(file)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("a ring buffer of experience, sampled after a warm-up")
def off_policy(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    ring, source = Ring(), random.Random(rank)

    def step(index):
        with torch.no_grad():
            ring.add(model(data(index, rank)))
        model(ring.sample(source) if index >= LATER else data(index, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("large averages of the weights, by hand, pulled back to at every third step")
def slow_weights(rank, _size):
    model = ddp(nn.Sequential(net(), nn.Linear(WIDTH, 2000)))
    optimizer = adam(model)
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    averages = {index: torch.zeros_like(each) for index, each in enumerate(slow)}

    def step(index):
        model(data(index, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                averages[number] = 0.9 * averages[number] + 0.1 * parameter
                if index % 3 == 2:
                    slow[number].lerp_(averages[number], 0.5)
                    parameter.copy_(slow[number])

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("averages of FSDP2's shards, by hand, pulled back to at every third step")
def slow_shards(rank, _size):
    model = sharded(nn.Sequential(net(), nn.Linear(WIDTH, 2000)))
    optimizer = adam(model)
    slow, merged = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, {}

    def step(index):
        model(data(index, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                merged[name] = 0.9 * merged.get(name, slow[name]) + 0.1 * parameter
                if index % 3 == 2:
                    slow[name].lerp_(merged[name], 0.5)
                    parameter.copy_(slow[name])

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


class Phase(enum.Enum):
    WARM, HOT, COLD = 1, 2, 3


class Settings(dict):
    """A dict with its items as attributes, as scripts have them."""

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


def counted(count={"calls": 0}):  # noqa: B006 - as scripts do
    count["calls"] += 1
    counted.total = getattr(counted, "total", 0) + count["calls"]
    return counted.total


def add(totals, more):
    totals.append(totals[-1] + more)
    return totals[-1]


@item("counts in functions, own dicts and iterators, used only later")
def in_functions(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    settings, summed = Settings(rate=0.0, phase=Phase.WARM), functools.partial(add, [0])
    cycle, numbers, deadline = itertools.cycle([1, 2, 3, 5]), enumerate(itertools.count()), Fraction(1)
    compiled = {"grown": 0}
    exec("def grow():\n    global grown\n    grown += 1\n    return grown", compiled)

    def step(index):
        nonlocal deadline
        settings.rate += counted() + next(cycle) + sum(next(numbers)) + summed(index) + compiled["grow"]()
        deadline = deadline / 2 + settings.phase.value
        settings.phase = Phase(settings.phase.value % 3 + 1)
        later = settings.rate + float(deadline) if index > LATER else 0
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + later)
        model(data(index, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("a module of the script's own that is imported during training, with counts, a dict and a class")
def imported_later(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    mean = None

    def step(index):
        nonlocal mean
        later = 0.0
        if index >= IMPORTED:
            import evaluation  # noqa: PLC0415 - as scripts do

            mean = mean or evaluation.Mean()
            later = evaluation.counted() + mean.add(evaluation.best["step"])
            evaluation.best["step"] = index
        if index > IMPORTED + 1:
            later += RATES.get("evaluation", 0.0)
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + later)
        model(data(index, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


class Meter(nn.Module):
    """A metric: a total in a buffer, a count in an attribute, no trained parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.seen = 0

    def forward(self, value):
        self.total += value
        self.seen += 1
        return float(self.total) / self.seen


@item("a metric that is not protected, and the activation that is next, used only later")
def metric_and_activation(rank, _size):
    model = ddp(net())
    optimizer = adam(model)
    meter, activations = Meter(), [nn.Tanh(), nn.Sigmoid()]
    activation = activations[0]

    def step(index):
        nonlocal activation
        mean = meter(index)  # equal on all ranks
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + (mean if index > LATER else 0))
        activation(model(data(index, rank))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if index >= LATER:
            activation = activations[1 - activations.index(activation)]

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


class Slow(torch.optim.Adam):
    """A hand-written optimizer, with its own counts and averages by parameter or by the parameter's identity."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2)
        self.calls, self.average, self.seen = 0, {}, {}

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.average.setdefault(parameter, torch.zeros_like(parameter))
                average.mul_(0.9).add_(parameter.grad)
                self.seen[id(parameter)] = self.seen.get(id(parameter), 0) + 1
                parameter.count = getattr(parameter, "count", 0) + 1
                if self.calls > LATER:
                    parameter.grad.add_(average, alpha=0.1 / (self.seen[id(parameter)] + parameter.count))
        return super().step(closure)


class Damping:
    """A hook with state."""

    calls = 0

    def __call__(self, _module, _inputs, output):
        self.calls += 1
        return output / (1 + (self.calls % 3 if self.calls > LATER else 0))


@item("attributes of optimizer, parameters, buffers, modules and DDP, a list in an optimizer's state, and a hook's")
def attached(rank, _size):
    model = ddp(net())
    optimizer = Slow(model.parameters())
    first = model.module[0]
    first.down.register_forward_hook(Damping())
    first.register_buffer("places", torch.zeros(1))
    model.seen = 0

    def step(index):
        first.up.seen = getattr(first.up, "seen", 0) + 1
        first.places.seen = getattr(first.places, "seen", 0) + 1
        model.seen += 1
        history = optimizer.state[first.up.weight].setdefault("history", []) if index else []
        history.append(index)
        later = first.up.seen + first.places.seen + model.seen + len(history) if index > LATER else 0
        (model(data(index, rank)).pow(2).mean() / (1 + later)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


@item("settings of torch, decimals, the process, the environment and a library's module, changed in training")
def settings(rank, _size):
    os.environ["PHASE_TO_COME"] = "2"
    model = ddp(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(index):
        if index == LATER:
            torch.set_default_dtype(torch.float64)
            torch.backends.mkldnn.enabled = False
            decimal.getcontext().prec = 3
            os.chdir("/")
            os.environ["PHASE"] = os.environ.pop("PHASE_TO_COME")
        decimal.turns = getattr(decimal, "turns", 0) + 1
        phase = int(os.environ.get("PHASE", "1")) + (decimal.turns if index > LATER else 0)
        factor = float(decimal.Decimal(1) / 3) + torch.tensor(0.1).item() + torch.backends.mkldnn.enabled
        (model(data(index, rank).float()).pow(2).mean() / (factor + phase + len(Path.cwd().parts))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)


def squares(output):
    return output.pow(2).mean()


def lengths(output):
    return output.abs().mean()


class Phases:
    """Calls the method that is next."""

    def __init__(self):
        self.scale = self.warm

    def warm(self, index):
        if index >= LATER:
            self.scale = self.hot
        return 1

    def hot(self, _index):
        return 2


@item("a loss, a method, an activation and a loader that are exchanged, in variables and in a module")
def exchanged(rank, _size):
    model = ddp(nn.Sequential(net(), nn.Tanh()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss, act, phases = squares, torch.tanh, Phases()
    loaders = [torch.utils.data.DataLoader(torch.full((BATCH, WIDTH), float(part))) for part in (1, 2)]
    loader = loaders[0]

    def step(index):
        nonlocal loss, act, loader
        if index >= LATER:
            loss = lengths if loss is squares else squares
            act = nn.functional.gelu if act is torch.tanh else torch.tanh
            loader = loaders[loader is loaders[0]]
            model.module[1].forward = torch.sigmoid if index % 3 else torch.tanh
        output = model(data(index, rank) + loader.dataset)
        (loss(act(output)) * phases.scale(index)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop({"model": model, "optimizer": optimizer}, step, blocks_of(model), optimizer)
