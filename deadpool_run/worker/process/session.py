"""What a worker process was given: its rank, its descriptors, its line to the agent.

The environment is the carrier, so that it is the same for a worker forked from the fork server and for one that was
executed afresh; `current()` reads it once a process.
"""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.messages import Assign
from deadpool_run.worker.process.agent_link import AgentLink

FD_VARIABLES = {
    "status_page": "DEADPOOL_STATUS_PAGE_FD",
    "slot0": "DEADPOOL_SLOT0_FD",
    "slot1": "DEADPOOL_SLOT1_FD",
    "transcript": "DEADPOOL_TRANSCRIPT_FD",
}
_STREAMS = {"stdout": 1, "stderr": 2}


@dataclass(slots=True)
class Session:
    """A worker under deadpool-run."""

    rank: int
    local_rank: int
    """The rank's own, which LOCAL_RANK is not where every rank is to believe that it is the only one on its machine."""
    world_size: int
    worker: int
    epoch: int
    generation: int
    replacement: bool
    store_host: str
    store_port: int
    capture_interval: int
    status_page_fd: int
    slot_fds: tuple[int, int]
    transcript_fd: int
    replicate: bool
    """Whether the agent is to be told of each snapshot, because it sends it to other nodes."""
    link: AgentLink
    resume: int = -1  # the version that the first slot holds from before the job; -1: none
    preparing: bool = False  # a spare that rehearses ahead of need: its status page and slots are nobody's
    step: int | None = None  # the step that is running; None outside the loop
    disturbed: Callable[[], bool] = lambda: False  # whether the script goes astray now because a peer was lost
    give_up: Callable[[str | BaseException], None] = lambda _: None  # say why, and wait for what follows; never returns
    leave: Callable[[], tuple[int, list[int]]] = lambda: (
        0,
        [],
    )  # take down what the run made: steps done, versions held

    def begin_again(self) -> None:
        """Be what the environment says now: another run of the script begins."""
        self._read_environment()
        self.step = None
        self.disturbed, self.give_up, self.leave = lambda: False, lambda _: None, lambda: (0, [])

    def take(self, rank: Assign, fds: list[int]) -> None:
        """Take the rank, as a spare that has rehearsed as it."""
        named = dict(zip(rank.fds, fds, strict=True))
        for name in _STREAMS.keys() & named.keys():  # its streams are the rank's already
            os.close(named.pop(name))
        for fd in (self.status_page_fd, *self.slot_fds, self.transcript_fd):
            os.close(fd)
        put_in_environment(rank, named)
        self._read_environment()
        self.link.preparing = None

    def _read_environment(self) -> None:
        for name, value in _given(os.environ).items():
            setattr(self, name, value)


def redirect(fds: dict[str, int]) -> None:
    """Have the standard streams among the descriptors be this process's; the others are left."""
    for name, number in _STREAMS.items():
        if name in fds:
            os.dup2(fds[name], number)
            os.close(fds.pop(name))


def put_in_environment(rank: Assign, fds: dict[str, int], *, whole: bool = False) -> None:
    """Have the environment say what this process was given; `whole`: and nothing of what it said before."""
    env = {"DEADPOOL_CONTROL_FD": os.environ.get("DEADPOOL_CONTROL_FD", ""), **rank.env}
    env["DEADPOOL_PREPARING"] = str(int(rank.prepare))
    env["DEADPOOL_LOCAL_RANK"] = str(rank.local_rank)
    for name, variable in FD_VARIABLES.items():
        env[variable] = str(fds[name])
    if whole:
        os.environ.clear()
    os.environ.update(env if whole else {name: value for name, value in env.items() if name.startswith("DEADPOOL_")})


def under_deadpool(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process is a worker of deadpool-run."""
    return "DEADPOOL_CONTROL_FD" in environment


@cache
def current() -> Session:
    """Return this worker's session; its link starts to read with the first call. Raises `ProtocolError`."""
    given = _given(os.environ)
    return Session(
        **given, link=AgentLink(socket.socket(fileno=int(os.environ["DEADPOOL_CONTROL_FD"])), given["epoch"])
    )


def _given(env: Mapping[str, str]) -> dict[str, Any]:
    """Return what the environment says. Raises `ProtocolError`."""
    try:
        host, _, port = env["DEADPOOL_STORE"].rpartition(":")
        fds = {name: int(env[variable]) for name, variable in FD_VARIABLES.items()}
        return {
            "rank": int(env["RANK"]),
            "local_rank": int(env["DEADPOOL_LOCAL_RANK"]),
            "world_size": int(env["WORLD_SIZE"]),
            "worker": int(env["DEADPOOL_WORKER"]),
            "epoch": int(env["DEADPOOL_EPOCH"]),
            "generation": int(env["TORCHELASTIC_RESTART_COUNT"]),
            "replacement": env["DEADPOOL_REPLACEMENT"] == "1",
            "store_host": host,
            "store_port": int(port),
            "capture_interval": int(env["DEADPOOL_CAPTURE_INTERVAL"]),
            "status_page_fd": fds["status_page"],
            "slot_fds": (fds["slot0"], fds["slot1"]),
            "transcript_fd": fds["transcript"],
            "replicate": env.get("DEADPOOL_REPLICATE") == "1",
            "resume": int(env.get("DEADPOOL_RESUME_VERSION", "-1")),
            "preparing": env.get("DEADPOOL_PREPARING") == "1",
        }
    except (KeyError, ValueError) as error:
        raise ProtocolError(
            f"this worker's environment is not one that deadpool-run made ({error!r}); "
            "do not change DEADPOOL_* variables in the script"
        ) from error
