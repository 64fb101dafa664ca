"""Loops whose set-up depends on the other ranks, or on a file that training writes: setup_facts.py CASE FOLDER [RANK STEP].

The rank is killed in that step, once.
"""

import hashlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "process" / "scripts"))

from telling import tell

import deadpool_run as deadpool

STEPS = 12
WIDTH = 64
LARGE = (64 << 20) // 4 + 1
"""A number of floats with more bytes than transcripts keep."""
CASES = {}


def case(function):
    """Register a case: a function of the job and the file that returns an input of the steps, or of one of them."""
    CASES[function.__name__.replace("_", "-")] = function
    return function


def saved(file, default):
    return torch.load(file) if file.exists() else default


@case
def teacher(job, _file):
    """Rank 0 has the weights of a teacher, and sends them to the others."""
    model = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    if job.rank == 0:
        nn.init.constant_(model.weight, 0.01)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    return model


@case
def statistics(job, _file):
    """All ranks sum the statistics of their data."""
    sums = torch.full((2 * WIDTH, WIDTH), 1 / (1 + job.rank))
    dist.all_reduce(sums)
    return lambda inputs: inputs + sums[:4]


@case
def asynchronous_statistics(job, _file):
    """The same, waited for in the first step."""
    sums = torch.full((2 * WIDTH, WIDTH), 1 / (1 + job.rank))
    work = [dist.all_reduce(sums, async_op=True)]

    def first(inputs):
        while work:
            work.pop().wait()
        return inputs + sums[:4]

    return first


@case
def too_large(job, _file):
    """All ranks get a table from rank 0 that is larger than a transcript may be."""
    table = torch.full((LARGE,), 1 / (1 + job.rank))
    dist.broadcast(table, src=0)
    return lambda inputs: inputs + table[:WIDTH]


@case
def large_state(job, _file):
    """Rank 0 reads a checkpoint, and sends each of its tensors to the others, which load it: it is the model's."""
    job.large = nn.Linear(LARGE // WIDTH, WIDTH, bias=False)
    weight = torch.full((WIDTH, LARGE // WIDTH), 1 / (1 + job.rank))
    dist.broadcast(weight, src=0)
    job.large.load_state_dict({"weight": weight})
    return lambda inputs: inputs


@case
def total(_job, file):
    """The script resumes from its own checkpoint, and runs the steps that are left."""
    global STEPS  # noqa: PLW0603 - as scripts do
    STEPS -= saved(file, 0)
    return lambda inputs: inputs


@case
def number(_job, file):
    """The script resumes from its own checkpoint, and counts on from its number."""
    start = saved(file, 0)
    return lambda inputs: inputs + start


@case
def unused_number(_job, file):
    """The same number has no effect on the steps."""
    start = saved(file, 0)
    return lambda inputs: inputs if torch.is_grad_enabled() else start


@case
def tensor(_job, file):
    """The script normalizes by the mean that its own checkpoint has."""
    mean = torch.full((WIDTH,), float(saved(file, 0)))
    return lambda inputs: inputs + mean


@case
def own_values(_job, _file):
    """Each process has other paths, times, ports and numbers of processes."""
    own = {"pid": os.getpid(), "text": str(os.getpid()), "memory": torch.empty(0).data_ptr() + (os.getpid() << 20)}
    pid, share, path = os.getpid(), os.getpid() / 7, f"/{os.getpid()}"
    return lambda inputs: inputs + 0 * (pid + len(own) + int(share) + len(path[:0]))


def main():
    name, folder, *death = sys.argv[1:]
    job = deadpool.init()
    torch.manual_seed(job.rank)
    file = Path(folder) / "checkpoint.pt"
    prepared = CASES[name](job, file)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job.protect(model=model, optimizer=optimizer, **({"large": job.large} if hasattr(job, "large") else {}))
    for step in job.steps(STEPS):
        with step:
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step.index + job.rank))
            model(prepared(inputs)).pow(2).mean().backward()
            if death == [str(job.rank), str(step.index)] and (job.rebuilds, job.rehearsing) == (0, False):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
        if step.index == 2 and job.rank == 0 and not job.rehearsing:
            torch.save(3, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    tell("weights", sum=hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
