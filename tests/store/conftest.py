"""A store in a process of its own with this test as its agent, and clients of it that torch made.

Not in a thread: some calls of torch's clients keep the interpreter's lock until they are answered.
"""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from deadpool_run.wire.messages import FORMAT, Message, encode

LIMIT_S = 60
SERVER = """
import socket, sys
from deadpool_run.store.server import StoreServer
listener, control = (socket.socket(fileno=int(each)) for each in sys.argv[1:3])
StoreServer(listener, control, float(sys.argv[3])).serve()
"""
TIMEOUT = timedelta(seconds=LIMIT_S)


class House:
    """The server, and the agent's end of its control socket."""

    def __init__(self, listener: socket.socket, answer_s: float) -> None:
        self.address = listener.getsockname()[:2]
        self.agent, theirs = socket.socketpair()
        self.agent.settimeout(LIMIT_S)
        fds = listener.fileno(), theirs.fileno()
        command = [sys.executable, "-c", SERVER, *map(str, fds), str(answer_s)]
        self.process = subprocess.Popen(command, pass_fds=fds)
        listener.close()
        theirs.close()
        self._frames = FORMAT.frames()

    def client(self, timeout: timedelta = TIMEOUT) -> TCPStore:
        """A connection of torch's."""
        return TCPStore(*self.address, is_master=False, wait_for_workers=False, timeout=timeout)

    def told(self) -> Message:
        """The next message for the agent."""
        while True:
            for message in self._frames.feed(self.agent.recv(self._frames.missing)):
                return message

    def tell(self, message: Message) -> None:
        """Send a message of the agent."""
        self.agent.sendall(encode(message))

    def close(self) -> None:
        """End the server."""
        self.agent.close()
        assert self.process.wait(LIMIT_S) == 0


@pytest.fixture
def serve() -> Iterator[Callable[..., House]]:
    """Serve a store on a listening socket, 127.0.0.1 by default."""
    houses: list[House] = []

    def start(listener: socket.socket | None = None, answer_s: float = LIMIT_S) -> House:
        houses.append(House(listener or socket.create_server(("127.0.0.1", 0)), answer_s))
        return houses[-1]

    yield start
    for house in houses:
        house.close()


@pytest.fixture
def house(serve: Callable[..., House]) -> House:
    """A store on 127.0.0.1."""
    return serve()
