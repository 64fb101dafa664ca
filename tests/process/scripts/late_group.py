"""`train.py` that creates a group of all ranks in step 4."""

import os
import sys
from pathlib import Path

import layouts
import torch.distributed as dist


def with_group(make):
    def made(*args):
        training = make(*args)
        step = training.step

        def grouped(index):
            if index == 4:
                training.group = dist.new_group()
            return step(index)

        training.step = grouped
        return training

    return made


if __name__ == "__main__":
    layouts.LAYOUTS.update({name: with_group(make) for name, make in layouts.LAYOUTS.items()})
    sys.argv += ["--flags", str(Path(os.environ["KIT_EVENTS"]).parent / "flags")]
    import train

    train.main()
