"""Trains a layout, and has rank 0 write the whole state of the last step as torch gives it."""

import sys

import torch
import torch.distributed as dist
from layouts import LAYOUTS
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import deadpool_run as deadpool


def main(layout, steps, path):
    torch.set_num_threads(1)
    job = deadpool.init()
    training = LAYOUTS[layout](0)
    job.protect(model=training.model, optimizer=training.optimizer)
    if training.scheduler is not None:
        job.protect(scheduler=training.scheduler)
    for step in job.steps(int(steps)):
        with step:
            training.step(step.index)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(training.model, training.optimizer, options=options)
    if job.rank == 0:
        torch.save({"model": model, "optimizer": optimizer}, path)
    dist.barrier()


main(*sys.argv[1:])
