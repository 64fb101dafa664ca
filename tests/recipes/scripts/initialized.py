"""Run a module as `python -m` does, in a job that has called `deadpool_run.init()`: its groups are of our backend."""

import runpy
import sys

import torch.distributed as dist

import deadpool_run as deadpool

if __name__ == "__main__":
    deadpool.init()
    assert "deadpool" in repr(dist.group.WORLD)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
