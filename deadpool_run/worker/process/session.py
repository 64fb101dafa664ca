"""The session of a worker process: its rank, its descriptors, its link to the agent.

The environment carries it, so that it is the same for a worker forked by the fork server and for one that was executed.
`current()` reads the environment once per process.
"""

import os
import socket
from collections.abc import Callable
from functools import cache

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Epoch, Version
from deadpool_run.wire.messages import Assign
from deadpool_run.worker.process.agent_link import AgentLink

_FD_VARIABLES = {name: f"DEADPOOL_{name.upper()}_FD" for name in ("status_page", "slot0", "slot1", "transcript")}
_STREAMS = {"stdout": 1, "stderr": 2}


class Session:
    """A worker under deadpool-run. Raises `ProtocolError` if its environment was changed."""

    def __init__(self) -> None:
        """Read the environment, and start the link's reading thread."""
        self.begin_again()
        self.link = AgentLink(socket.socket(fileno=int(os.environ["DEADPOOL_CONTROL_FD"])), self.epoch)

    def begin_again(self) -> None:
        """Read the environment: a run of the script begins."""
        self._read_environment()
        self.threads = os.environ.get("OMP_NUM_THREADS", "")
        """As the run began. The script may set another number."""
        self.step: int | None = None
        """The step that is running; None outside the loop."""
        self.loss_pending: Callable[[], bool] = lambda: False
        """Whether a peer was lost and not replaced yet: a failure of the script may be a consequence."""
        self.report_and_wait: Callable[[str | BaseException], None] = lambda _: None
        """Reports why the script failed, and waits for the agent's decision; never returns."""
        self.leave: Callable[[], tuple[Version, tuple[Version, ...]]] = lambda: (Version(0), ())
        """Tears down the run; returns the steps completed and the versions held."""

    def take(self, rank: Assign, fds: list[int]) -> None:
        """Become the rank, after this spare has rehearsed it."""
        named = dict(zip(rank.fds, fds, strict=True))
        for name in _STREAMS.keys() & named.keys():  # standard streams are the rank's already
            os.close(named.pop(name))
        for fd in (self.status_page_fd, *self.slot_fds, self.transcript_fd):
            os.close(fd)
        env = _environment_of(rank, named)
        os.environ.update({name: value for name, value in env.items() if name.startswith("DEADPOOL_")})
        self._read_environment()
        self.link.preparing = None

    def _read_environment(self) -> None:
        env = os.environ
        try:
            host, _, port = env["DEADPOOL_STORE"].rpartition(":")
            fds = {name: int(env[variable]) for name, variable in _FD_VARIABLES.items()}
            self.rank = int(env["RANK"])
            self.local_rank = int(env["DEADPOOL_LOCAL_RANK"])
            """The true one. LOCAL_RANK is 0 everywhere if each rank is to see itself as the only one on its machine."""
            self.world_size = int(env["WORLD_SIZE"])
            self.workers = int(env["LOCAL_WORLD_SIZE"])
            """Of this node."""
            self.worker = int(env["DEADPOOL_WORKER"])
            self.epoch = Epoch(int(env["DEADPOOL_EPOCH"]))
            self.generation = int(env["TORCHELASTIC_RESTART_COUNT"])
            self.replacement = env["DEADPOOL_REPLACEMENT"] == "1"
            self.store = (host, int(port))
            self.capture_interval = int(env["DEADPOOL_CAPTURE_INTERVAL"])
            self.status_page_fd = fds["status_page"]
            self.slot_fds = (fds["slot0"], fds["slot1"])
            self.transcript_fd = fds["transcript"]
            self.replicate = env.get("DEADPOOL_REPLICATE") == "1"
            """Whether to report each snapshot to the agent, which sends it to other nodes."""
            self.resume = int(env.get("DEADPOOL_RESUME_VERSION", "-1"))
            """The version that the first slot holds from a checkpoint; -1: none."""
            self.console = env.get("DEADPOOL_CONSOLE") == "1"
            """Whether stderr is the job's console, and not a file of the rank."""
            self.preparing = env.get("DEADPOOL_PREPARING") == "1"
            """A spare that rehearses before it is needed: its status page and slots are throw-away ones."""
        except (KeyError, ValueError) as error:
            raise ProtocolError(
                f"this worker's environment lacks what deadpool-run set ({error!r}): something removed or changed it.\n"
                "Don't change DEADPOOL_* variables, RANK or WORLD_SIZE in the script."
            ) from error


def assume(rank: Assign, fds: list[int]) -> None:
    """Make the rank's standard streams and environment this process's own."""
    named = dict(zip(rank.fds, fds, strict=True))
    for name, number in _STREAMS.items():
        if name in named:
            os.dup2(named[name], number)
            os.close(named.pop(name))
    env = _environment_of(rank, named)
    os.environ.clear()
    os.environ.update(env)


def _environment_of(rank: Assign, fds: dict[str, int]) -> dict[str, str]:
    return {
        "DEADPOOL_CONTROL_FD": os.environ.get("DEADPOOL_CONTROL_FD", ""),
        **rank.env,
        "DEADPOOL_PREPARING": str(int(rank.prepare)),
        "DEADPOOL_CONSOLE": str(int("stderr" not in rank.fds)),
        "DEADPOOL_LOCAL_RANK": str(rank.local_rank),
        **{variable: str(fds[name]) for name, variable in _FD_VARIABLES.items()},
    }


def under_deadpool() -> bool:
    """Return whether this process is a worker of deadpool-run."""
    return "DEADPOOL_CONTROL_FD" in os.environ


@cache
def current() -> Session:
    """Return this worker's session. The first call starts the link's reading thread. Raises `ProtocolError`."""
    return Session()
