"""Ranks that use the job's store, then wait for the test (`hold`), or die in their first generation (`die`)."""

import os
import signal
import sys
from pathlib import Path

from telling import tell
from torch.distributed import TCPStore


def connect():
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


def found():
    return connect().check(["value"])


tell("before", found=found(), port=os.environ["MASTER_PORT"])
store = connect()
store.add("seen", 1)
while store.add("seen", 0) < 2:  # until both have looked
    os.sched_yield()
store.set("value", "here")
if sys.argv[1] == "die" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "hold":
    tell("set")
    os.read(os.open(Path(os.environ["KIT_EVENTS"]).parent / "flags" / "release", os.O_RDONLY), 1)
    tell("after", found=found())
