"""Ranks that use the job's store, before and after the test has killed its process."""

import os
from pathlib import Path

from telling import tell
from torch.distributed import TCPStore


def connect():
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


connect().set("value", "old")
tell("set")
os.read(os.open(Path(os.environ["KIT_EVENTS"]).parent / "flags" / "release", os.O_RDONLY), 1)
tell("got", value="old" if connect().check(["value"]) else "fresh")
