"""Training loops that cannot be exact after a loss, each for one reason. The library must refuse them before step 2."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import functools
import itertools
import queue
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).parents[2] / "process" / "scripts"))

from telling import tell

import deadpool_run as deadpool

STEPS = 8
WIDTH = 8
LARGE = 17 << 20
"""A number of floats with more bytes than snapshots keep of a variable."""
BREACHES = {}


def breach(name):
    """Register a breach: a function of the job that returns the objects to protect and a step."""

    def put(function):
        BREACHES[name] = function
        return function

    return put


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def data(index, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * index + rank))


def trained(model, optimizer, inputs):
    model(inputs).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


@breach("nothing is protected")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    return {}, lambda index: trained(model, optimizer, data(index, job.rank))


@breach("the optimizer is not protected")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    return {"model": model}, lambda index: trained(model, optimizer, data(index, job.rank))


@breach("the optimizer is not protected, and first steps in step 1")
def _(job):
    model = DistributedDataParallel(net())
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), adam(model)

    def step(index):
        trained(model, second if index % 2 else first, data(index, job.rank))

    return {"model": model, "first": first}, step


@breach("the model under DDP is not protected")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    return {"optimizer": optimizer}, lambda index: trained(model, optimizer, data(index, job.rank))


@breach("the model under FSDP2 is not protected")
def _(job):
    model = net()
    fully_shard(model)
    optimizer = adam(model)
    return {"optimizer": optimizer}, lambda index: trained(model, optimizer, data(index, job.rank))


@breach("a scheduler is not protected")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)

    def step(index):
        trained(model, optimizer, data(index, job.rank))
        scheduler.step()

    return {"model": model, "optimizer": optimizer}, step


@breach("a GradScaler is not protected")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", growth_interval=100)

    def step(index):
        scaler.scale(model(data(index, job.rank)).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


@breach("an average of the weights is not protected")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(index):
        trained(model, optimizer, data(index, job.rank))
        average.update_parameters(model.module)

    return {"model": model, "optimizer": optimizer}, step


class HandMadeAverage:
    """Averages of the weights, with several decays."""

    def __init__(self, model, decays):
        self.decays = torch.linspace(0.9, 0.999, decays)[:, None, None]
        self.shadow = {
            name: parameter.detach().expand(decays, *parameter.shape).clone()
            for name, parameter in model.named_parameters()
        }

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.shadow[name] = self.decays * self.shadow[name] + (1 - self.decays) * parameter.detach()


@breach("a large average of the weights is kept by hand")
def _(job):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(256, 256, bias=False))
    optimizer = adam(model)
    average = HandMadeAverage(model, LARGE // 256 // 256)

    def step(_index):
        trained(model, optimizer, torch.randn(4, 256))
        average.update(model)

    return {"model": model, "optimizer": optimizer}, step


@breach("a tensor is trained by hand, and not protected")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    scale = torch.ones(WIDTH, requires_grad=True)

    def step(index):
        (model(data(index, job.rank)) * scale).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(scale.grad)
        with torch.no_grad():
            scale.sub_(0.01 * scale.grad)
        scale.grad = None

    return {"model": model, "optimizer": optimizer}, step


@breach("a collective is waited for in the next step")
def _(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending = []

    def step(index):
        model(data(index, job.rank)).pow(2).mean().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        if pending:
            work, delayed = pending.pop()
            work.wait()
            at = 0
            for parameter in model.parameters():
                parameter.grad.copy_(delayed[at : at + parameter.numel()].view_as(parameter) / dist.get_world_size())
                at += parameter.numel()
            optimizer.step()
        optimizer.zero_grad()
        pending.append((dist.all_reduce(gradients, async_op=True), gradients))

    return {"model": model, "optimizer": optimizer}, step


@breach("a future of a collective is waited for in the next step")
def _(job):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending = []

    def step(index):
        model(data(index, job.rank)).pow(2).mean().backward()
        if pending:
            scale = pending.pop().wait()[0]
            for parameter in model.parameters():
                parameter.grad.mul_(scale.mean())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        pending.append(dist.all_reduce(data(index, job.rank).abs(), async_op=True).get_future())

    return {"model": model, "optimizer": optimizer}, step


@breach("a large batch is fetched in the step before, as nanoGPT does")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    batch = [torch.randn(LARGE // WIDTH, WIDTH)]

    def step(_index):
        model(batch[0]).pow(2).mean().backward()
        batch[0] = torch.randn(LARGE // WIDTH, WIDTH)
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


@breach("an iterator over a loader is kept from step to step")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    samples = [data(index, job.rank) for index in range(4 * STEPS)]
    batches = iter(torch.utils.data.DataLoader(samples, batch_size=2))

    def step(_index):
        trained(model, optimizer, next(batches))

    return {"model": model, "optimizer": optimizer}, step


@breach("a count that a generator keeps sets the learning rate")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    counts = (number for number in itertools.count(1))

    def step(index):
        optimizer.param_groups[0]["lr"] = 1e-2 / next(counts)
        trained(model, optimizer, data(index, job.rank))

    return {"model": model, "optimizer": optimizer}, step


class Average:
    """An average in a queue. Snapshots do not keep contents of queues."""

    def __init__(self):
        self.queue = queue.SimpleQueue()
        self.queue.put(1.0)

    @property
    def value(self):
        value = self.queue.get()
        self.queue.put(value)
        return value

    def add(self, value):
        self.queue.put(0.9 * self.queue.get() + 0.1 * value)


@breach("an average in a queue scales the loss")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    average = Average()

    def step(index):
        loss = model(data(index, job.rank)).pow(2).mean()
        average.add(loss.item())
        (loss / average.value).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, step


class Held:
    """Weights that no module has and no optimizer updates, as `torch.func` uses them."""

    def __init__(self):
        self.module = net()
        self.weights = {name: weight.detach().clone() for name, weight in self.module.named_parameters()}

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = dict(state["weights"])

    def loss(self, weights, inputs):
        return functional_call(self.module, weights, (inputs,)).pow(2).mean()

    def train(self, inputs, scale):
        for name, gradient in grad(self.loss)(self.weights, inputs).items():
            dist.all_reduce(gradient)
            self.weights[name] = self.weights[name] - 1e-2 / scale * gradient


@breach("only an object of the script's own is protected, with weights that an average in a queue scales")
def _(job):
    held, average = Held(), Average()

    def step(index):
        inputs = data(index, job.rank)
        average.add(held.loss(held.weights, inputs).item())
        held.train(inputs, average.value)

    return {"held": held}, step


class Meter:
    """An average of a library, in an object that also has a file. Snapshots leave such objects alone."""

    def __init__(self):
        self.inner, self.file = [{"value": torch.ones(())}], sys.stdout

    def add(self, value):
        self.inner[0]["value"].mul_(0.9).add_(0.1 * value)


Meter.__module__ = "of.a.library"


@breach("an average of a library, beside a file, scales the loss")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    meter, unused = Meter(), Meter()

    def step(index):
        loss = model(data(index, job.rank)).pow(2).mean()
        meter.add(loss.item())
        (loss / meter.inner[0]["value"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert unused.inner[0]["value"] == 1

    return {"model": model, "optimizer": optimizer}, step


@breach("an average in a queue sets the rate, and gradients are accumulated over three steps")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    average = Average()

    def step(index):
        loss = model(data(index, job.rank)).pow(2).mean()
        loss.backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            average.add(loss.item())
            optimizer.param_groups[0]["lr"] = 1e-2 * average.value

    return {"model": model, "optimizer": optimizer}, step


@breach("enumerate() counts the steps, for later")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    numbers = enumerate(_ for _ in iter(int, 1))
    number = 0

    def step(index):
        nonlocal number
        number, _ = next(numbers)
        if number > 100 * STEPS:
            optimizer.param_groups[0]["lr"] = 1e-2 / number
        trained(model, optimizer, data(index, job.rank))

    return {"model": model, "optimizer": optimizer}, step


@breach("a module keeps a large mean in a plain attribute")
def _(job):
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()
            self.mean = torch.zeros(LARGE // WIDTH, WIDTH)

        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            return self.inner(x - self.mean[0])

    model = DistributedDataParallel(Normalized())
    optimizer = adam(model)
    return {"model": model, "optimizer": optimizer}, lambda index: trained(model, optimizer, data(index, job.rank))


class Ring:
    def __init__(self):
        self.rows, self.n = torch.zeros(LARGE // WIDTH, WIDTH), 0

    def add(self, rows):
        self.rows[self.n : self.n + len(rows)] = rows
        self.n += len(rows)


@breach("a large buffer is filled from the first step, and sampled later")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    ring = Ring()

    def step(index):
        ring.add(data(index, job.rank))
        trained(model, optimizer, data(index, job.rank) if index < 5 else ring.rows[: ring.n].roll(index, 0)[:4])

    return {"model": model, "optimizer": optimizer}, step


@breach("losses of several steps are summed, for one backward")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    total = 0.0

    def step(index):
        nonlocal total
        total = total + model(data(index, job.rank)).pow(2).mean()
        if index % 2:
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = 0.0

    return {"model": model, "optimizer": optimizer}, step


@breach("nothing is done in a rehearsal")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)

    def step(index):
        if not job.rehearsing:
            trained(model, optimizer, data(index, job.rank))

    return {"model": model, "optimizer": optimizer}, step


@breach("the step is drawn by a generator function")
def _(job):
    def drawn():
        generator = torch.Generator().manual_seed(job.rank)
        while True:
            yield torch.randn(4, WIDTH, generator=generator)

    model = DistributedDataParallel(net())
    optimizer = adam(model)
    inputs = drawn()
    return {"model": model, "optimizer": optimizer}, lambda _index: trained(model, optimizer, next(inputs))


@functools.lru_cache
def noise_of(_block):
    return torch.randn(4, WIDTH)


@breach("a function with functools.lru_cache draws numbers")
def _(job):
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    return {"model": model, "optimizer": optimizer}, lambda index: trained(model, optimizer, noise_of(index // 4))


def main():
    job = deadpool.init()
    protect, step_of = BREACHES[sys.argv[1]](job)
    if protect:
        job.protect(**protect)
    for step in job.steps(STEPS):
        tell("step", index=step.index, rehearsing=job.rehearsing)
        with step:
            step_of(step.index)
    tell("end")


if __name__ == "__main__":
    with contextlib.suppress(IndexError):
        main()
