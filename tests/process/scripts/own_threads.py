"""Issues collectives in threads of its own. Rank 1 dies where `--die STEP` says, once, while a thread of rank 0 needs it.

`--way save`: `async_save()` of torch writes a checkpoint in every third step, over a group of its own.
`--way meter`: one thread sums a number of each step, from the first step to the last.
`--way pool`: each step reduces its gradients in an executor, and waits for them.
`--way loop`: the loop itself runs in a thread, and the main thread has a collective after it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import hashlib
import queue
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from telling import tell

import deadpool_run as deadpool
from deadpool_run.errors import PeerLostError

parser = argparse.ArgumentParser()
parser.add_argument("--way", choices=("save", "meter", "pool", "loop"), required=True)
parser.add_argument("--die", type=int, default=-1)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--uncaught", action="store_true", help="let the loss in a thread end the script")
parser.add_argument("--folder", type=Path, required=True)
args = parser.parse_args()


def die(step):
    flag = args.folder / "died"
    if dist.get_rank() == 1 and step == args.die and not job.rehearsing and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def save(step):
    """Wait for the last checkpoint, and begin the next one."""
    global saving  # noqa: PLW0603
    finish()
    die(step)
    if not job.rehearsing:
        saving = dcp.async_save(
            {"model": model.state_dict()}, checkpoint_id=args.folder / f"step-{step}", process_group=threads
        )


def finish():
    global saving
    future, saving = saving, None
    try:
        if future is not None:
            future.result()
            tell("saved", shards=sorted({each.relative_path for each in future.result().storage_data.values()}))
    except PeerLostError as error:
        tell("lost", text=str(error))
        if args.uncaught:
            raise


def meter():
    while (step := asked.get()) is not None:
        number = torch.tensor([float(step), 1.0])
        try:
            dist.all_reduce(number, group=threads)
        except PeerLostError as error:
            tell("lost", text=str(error))
            break
        tell("sum", step=step, value=number.tolist())


def reduce(parameter, group, step):
    if group is threads:
        die(step)
    dist.all_reduce(parameter.grad, group=group)


tell("start")
job = deadpool.init()
torch.manual_seed(5)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
job.protect(model=model, optimizer=optimizer)
threads = dist.new_group([0, 1], backend="gloo") if args.way != "pool" else dist.new_group([0, 1])
saving = None
asked = queue.SimpleQueue()
pool = ThreadPoolExecutor(2)
if args.way == "meter":
    threading.Thread(target=meter, daemon=True).start()


def train():
    for step in job.steps(args.steps):
        with step:
            torch.manual_seed(1000 * dist.get_rank() + step.index)
            model(torch.randn(16, 8)).square().mean().backward()
            if args.way == "pool":
                pairs = zip(model.parameters(), (threads, dist.group.WORLD), strict=True)
                for future in [pool.submit(reduce, *pair, step.index) for pair in pairs]:
                    future.result()
            else:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                if args.way == "loop":
                    die(step.index)
            optimizer.step()
            optimizer.zero_grad()
        if args.way == "save" and step.index % 3 == 2:
            save(step.index)
        if args.way == "meter" and not job.rehearsing:
            asked.put(step.index)
            if dist.get_rank() == 1 and step.index == args.die:
                die(step.index)


if args.way == "loop":
    training = threading.Thread(target=train)
    training.start()
    training.join()
    dist.barrier()
else:
    train()
finish()
asked.put(None)
words = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
tell("end", digest=words)
