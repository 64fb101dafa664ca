"""Run a module as `python -m` does, and destroy its process groups at the end.

Torch may abort a process that ends without: a thread of Gloo still has a tensor when the interpreter is gone (pytorch/pytorch,
pull request 179291). Accelerate's scripts end so.
"""

import runpy
import sys

import torch.distributed as dist

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    if dist.is_initialized():
        dist.destroy_process_group()
