"""Run a script, or a module as `python -m` does, and end the process before the interpreter is finalized.

A thread of Gloo may still hold a tensor then, and torch aborts the process (pytorch/pytorch, pull request 179291). It is rare,
and `destroy_process_group` does not always prevent it: DistributedDataParallel keeps the group, and with it the threads.
"""

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":
    del sys.argv[0]
    if Path(sys.argv[0]).is_file():
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
