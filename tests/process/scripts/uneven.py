"""`train.py` in which each step begins with the same piece of work on each rank, and tells how long that took the rank."""

import time

from stepped import train_with
from telling import tell

WORK, NAP_S = 60, 0.002
"""Short naps. A busy machine lengthens those of all ranks alike. Work on a CPU would not do: there, a stopped process gets a larger share later."""


def work():
    began = time.monotonic()
    for _ in range(WORK):
        time.sleep(NAP_S)
    return time.monotonic() - began


def timed(_training, step):
    def worked(index):
        tell("worked", step=index, seconds=work())
        return step(index)

    return worked


if __name__ == "__main__":
    train_with(timed)
