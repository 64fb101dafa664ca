"""Trains weights in an object of the script's own, which alone is protected: no module, no optimizer."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "process" / "scripts"))

from breaches import Held, data
from telling import tell

import deadpool_run as deadpool


def main():
    tell("start")
    job = deadpool.init()
    held = Held()
    job.protect(held=held)
    for step in job.steps(int(sys.argv[1])):
        tell("step", index=step.index, rehearsing=job.rehearsing)
        with step:
            held.train(data(step.index, job.rank), 1.0)
        tell("weights", index=step.index, sum=[weight.double().sum().item() for weight in held.weights.values()])
    tell("end")


if __name__ == "__main__":
    main()
