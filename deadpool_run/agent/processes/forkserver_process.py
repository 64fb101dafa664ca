"""Starts the fork server's process. Imports little: it runs before the rest of the agent is imported."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deadpool_run.agent.processes.forkserver_main import COMMAND


@dataclass(frozen=True, slots=True)
class ForkServerProcess:
    """One fork server: its process, not watched yet, and the agent's end of its socket."""

    pid: int
    sock: socket.socket


@dataclass(frozen=True, slots=True)
class ForkServerSpec:
    """Modules and environment of every fork server of a launch."""

    preload: tuple[str, ...]
    """Modules to import before it forks."""
    environment: Mapping[str, str]
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    """The soft limit on open files: the user's, which the agent raises for itself only."""

    def start(self, living: Iterable[int] = ()) -> ForkServerProcess:
        """Start one, which imports at once. `living`: processes that an earlier one forked, to be adopted."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-u", "-c", COMMAND]
            child = subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(theirs.fileno()), str(os.getpid()), str(self.open_files)],
                env=self.environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the agent to handle
            )
        child.returncode = 0  # reaped by pidfd, not by subprocess
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its pidfd reports its end
            for packet in ({"do": "adopt", "pids": list(living)}, {"do": "prepare", "modules": self.preload}):
                ours.sendall(json.dumps(packet).encode())
        return ForkServerProcess(child.pid, ours)
