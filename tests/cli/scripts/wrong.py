"""Scripts that are wrong on purpose: each breaks one rule, and `deadpool-run check` names what comes of it."""

import hashlib
import os
import queue
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

STEPS = 100


def batch(index, rank):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * index + rank))


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    model = DistributedDataParallel(net)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def update(model, optimizer, inputs):
    loss = model(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def right(job, *, protect=("model", "optimizer")):
    model, optimizer = make()
    job.protect(**{name: obj for name, obj in (("model", model), ("optimizer", optimizer)) if name in protect})
    for step in job.steps(STEPS):
        with step:
            update(model, optimizer, batch(step.index, job.rank))


def unprotected_optimizer(job):
    right(job, protect=("model",))


def nothing_protected(job):
    right(job, protect=())


def carried_batch(job):
    """The step takes its batch from a queue, and puts the next one into it before the update, so that a repeated step finds one."""
    model, optimizer = make()
    job.protect(model=model, optimizer=optimizer)
    source = torch.Generator().manual_seed(job.rank)
    job.protect(source=source)
    inputs = queue.SimpleQueue()
    inputs.put(torch.randn(8, 16, generator=source))
    for step in job.steps(STEPS):
        with step:
            now = inputs.get()
            inputs.put(torch.randn(8, 16, generator=source))
            update(model, optimizer, now)


def delayed_wait(job):
    """The mean of the weights is asked for in one step and used in the next."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.protect(model=model, optimizer=optimizer)
    mean, work = None, None
    for step in job.steps(STEPS):
        with step:
            if work is not None:
                work.wait()
                with torch.no_grad():
                    model.weight.lerp_(mean / job.world_size, 0.5)
            update(model, optimizer, batch(step.index, job.rank))
            mean = model.weight.detach().clone()
            work = dist.all_reduce(mean, async_op=True)
    work.wait()


def no_work_in_rehearsal(job):
    model, optimizer = make()
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            if not job.rehearsing:
                update(model, optimizer, batch(step.index, job.rank))


def hidden_average(job):
    """The learning rate follows an average of the loss in a queue, whose content no snapshot keeps."""
    model, optimizer = make()
    job.protect(model=model, optimizer=optimizer)
    averages = queue.SimpleQueue()
    averages.put(1.0)
    for step in job.steps(STEPS):
        with step:
            average = averages.get()
            averages.put(average)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, average)
            loss = update(model, optimizer, batch(step.index, job.rank)).detach()
            dist.all_reduce(loss)
            averages.put(0.9 * averages.get() + 0.1 * loss.item() / job.world_size)


def hidden_hash(job):
    """From step 3 on the inputs depend on a hash of all batches, whose state nobody can set: step 1, which runs twice, adds to it twice."""
    model, optimizer = make()
    job.protect(model=model, optimizer=optimizer)
    seen = hashlib.sha256()
    for step in job.steps(STEPS):
        with step:
            inputs = batch(step.index, job.rank)
            seen.update(inputs.numpy().tobytes())
            update(model, optimizer, inputs * (1 + seen.digest()[0] / 256) if step.index >= 3 else inputs)


def own_rates(job):
    """Each rank halves its learning rate by its own loss, so that replicas differ from step 7 on, without any loss of a rank."""
    model, optimizer = make()
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            if step.index == 6:
                for group in optimizer.param_groups:
                    group["lr"] /= 1 + job.rank
            update(model, optimizer, batch(step.index, job.rank))


def unseeded(job):
    """Every run begins with other weights, and is exact by itself."""
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            update(model, optimizer, batch(step.index, job.rank))


def nobody_looks(job):
    """As `carried_batch`, with the library's own check turned off: the run ends well, with other weights."""
    carried_batch(job)


def chance(job):
    """Protects a value that is never the same, and no part of the result."""
    model, optimizer = make()
    job.protect(model=model, optimizer=optimizer, clock=Clock())
    for step in job.steps(STEPS):
        with step:
            update(model, optimizer, batch(step.index, job.rank))


class Clock:
    def __init__(self):
        self.began = time.time()

    def state_dict(self):
        return {"began": self.began}

    def load_state_dict(self, state):
        self.began = state["began"]


def only_protected(job):
    """Right, but it does not run with torchrun."""
    if not job.protected:
        raise RuntimeError("start me with deadpool-run")
    right(job)


def no_loop(job):
    model, optimizer = make()
    job.protect(model=model, optimizer=optimizer)
    for index in range(3):
        update(model, optimizer, batch(index, job.rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](deadpool.init(verify=sys.argv[1] != "nobody_looks"))
    dist.destroy_process_group()
