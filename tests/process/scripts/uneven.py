"""`train.py` in which each step begins with the same piece of work on each rank, and tells how long that took the rank."""

import os
import sys
import time
from pathlib import Path

import layouts
import torch
from telling import tell

WORK = 300
"""Products of matrices: about a tenth of a second, which a slow rank does not do between two of its stops."""


def work():
    began = time.monotonic()
    matrix = torch.ones(192, 192) / 192
    for _ in range(WORK):
        matrix = matrix @ matrix
    return time.monotonic() - began


def timed(make):
    def made(*args):
        training = make(*args)
        step = training.step

        def worked(index):
            tell("worked", step=index, seconds=work())
            return step(index)

        training.step = worked
        return training

    return made


if __name__ == "__main__":
    layouts.LAYOUTS.update({name: timed(make) for name, make in layouts.LAYOUTS.items()})
    sys.argv += ["--flags", str(Path(os.environ["KIT_EVENTS"]).parent / "flags")]
    import train

    train.main()
