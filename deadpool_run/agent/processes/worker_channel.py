"""The agent's end of a worker's control socket: messages of `wire.messages`."""

import socket
from collections.abc import Callable

from deadpool_run.coordinator.message_stream import MessageStream
from deadpool_run.wire.messages import FORMAT, Message

MAX_UNSENT_BYTES = 8 << 20
"""A worker with more unread messages is broken: orders are few, and the largest is one `Assign`."""


class WorkerChannel(MessageStream[Message]):
    """One control socket. `on_broken` is called with the reason if the worker breaks the protocol or does not read.

    It is not called if the worker closes the socket, since the process may live on. Its pidfd reports its end.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_broken: Callable[[Exception], None]
    ) -> None:
        def ended(why: Exception) -> None:
            if not isinstance(why, ConnectionResetError):
                on_broken(why)

        super().__init__(sock, FORMAT, MAX_UNSENT_BYTES, on_message, ended)
