"""`train.py` in which each step begins with the same piece of work on each rank, and tells how long that took the rank."""

import os
import sys
import time
from pathlib import Path

import layouts
from telling import tell

WORK, NAP_S = 60, 0.002
"""Short naps. A busy machine lengthens those of all ranks alike. Work on a CPU would not do: there, a stopped process gets a larger share later."""


def work():
    began = time.monotonic()
    for _ in range(WORK):
        time.sleep(NAP_S)
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
