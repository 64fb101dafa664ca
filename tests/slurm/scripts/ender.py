"""An agent's end: waits for USR1; on the last node it then asks whether it is to end the job.

`all` and `others` say who is there to the end; any other argument is the run's directory, and the agent has given up.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

from deadpool_run.agent.cluster.slurm_cancel import cancel_if_abandoned, cancel_if_srun_is_gone
from deadpool_run.agent.slurm.discovery import discover

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
place = discover(os.environ)


def tell(text):
    with Path("told").open("a") as file:
        file.write(f"{place.name}: {text}\n")


tell(f"up as {os.getpid()}")
signal.sigwait({signal.SIGUSR1})
if place.step.index == len(place.step.nodes) - 1:
    living = {"all": {*place.nodes}, "others": {"n2", "n3"}}.get(sys.argv[1])
    if living is None:
        cancelled = asyncio.run(cancel_if_abandoned(place, Path(sys.argv[1]), tell))
    else:
        cancelled = asyncio.run(cancel_if_srun_is_gone(place, living, tell))
    tell(f"cancelled {cancelled}")
