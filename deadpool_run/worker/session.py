"""What a worker process was given: its rank, its descriptors, its line to the agent.

The environment is the carrier, so that it is the same for a worker forked from the nursery and for one that was
executed afresh; `current()` reads it once a process.
"""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from deadpool_run.errors import ProtocolError
from deadpool_run.worker.link import Link

FD_VARIABLES = {
    "board": "DEADPOOL_BOARD_FD",
    "slot0": "DEADPOOL_SLOT0_FD",
    "slot1": "DEADPOOL_SLOT1_FD",
    "transcript": "DEADPOOL_TRANSCRIPT_FD",
}


@dataclass(slots=True)
class Session:
    """A worker under deadpool-run."""

    rank: int
    local_rank: int
    world_size: int
    worker: int
    epoch: int
    generation: int
    newcomer: bool
    store_host: str
    store_port: int
    capture_interval: int
    board_fd: int
    slot_fds: tuple[int, int]
    transcript_fd: int
    replicate: bool
    """Whether the agent is to be told of each snapshot, because it sends it to other nodes."""
    link: Link
    resume: int = -1  # the version that the first slot holds from before the job; -1: none
    step: int | None = None  # the step that is running; None outside the loop
    disturbed: Callable[[], bool] = lambda: False  # whether the script goes astray now because a peer was lost
    give_up: Callable[[str | BaseException], None] = lambda _: None  # say why, and wait for what follows; never returns
    leave: Callable[[], tuple[int, list[int]]] = lambda: (
        0,
        [],
    )  # take down what the run made: steps done, versions held

    def begin_again(self) -> None:
        """Be a newcomer for the same rank, in the newest epoch."""
        self.newcomer, self.epoch, self.resume, self.step = True, self.link.orders.epoch, -1, None
        self.disturbed, self.give_up, self.leave = lambda: False, lambda _: None, lambda: (0, [])
        os.environ["DEADPOOL_NEWCOMER"] = "1"
        os.environ["DEADPOOL_EPOCH"] = str(self.epoch)
        os.environ["DEADPOOL_RESUME_VERSION"] = "-1"


def under_deadpool(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process is a worker of deadpool-run."""
    return "DEADPOOL_CONTROL_FD" in environment


@cache
def current() -> Session:
    """Return this worker's session; its link starts to read with the first call. Raises `ProtocolError`."""
    env = os.environ
    try:
        host, _, port = env["DEADPOOL_STORE"].rpartition(":")
        epoch = int(env["DEADPOOL_EPOCH"])
        fds = {name: int(env[variable]) for name, variable in FD_VARIABLES.items()}
        return Session(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            worker=int(env["DEADPOOL_WORKER"]),
            epoch=epoch,
            generation=int(env["TORCHELASTIC_RESTART_COUNT"]),
            newcomer=env["DEADPOOL_NEWCOMER"] == "1",
            store_host=host,
            store_port=int(port),
            capture_interval=int(env["DEADPOOL_CAPTURE_INTERVAL"]),
            board_fd=fds["board"],
            slot_fds=(fds["slot0"], fds["slot1"]),
            transcript_fd=fds["transcript"],
            replicate=env.get("DEADPOOL_REPLICATE") == "1",
            resume=int(env.get("DEADPOOL_RESUME_VERSION", "-1")),
            link=Link(socket.socket(fileno=int(env["DEADPOOL_CONTROL_FD"])), epoch),
        )
    except (KeyError, ValueError) as error:
        raise ProtocolError(
            f"this worker's environment is not one that deadpool-run made ({error!r}); "
            "do not change DEADPOOL_* variables in the script"
        ) from error
