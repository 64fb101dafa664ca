"""The agent's end of a worker's control socket: messages of `wire.messages`."""

import socket
from collections.abc import Callable, Sequence

from deadpool_run.coordinator.frame_stream import FrameStream
from deadpool_run.wire.messages import MAX_FRAME_BYTES, Message, decode, encode

MAX_UNSENT_BYTES = 8 << 20
"""A worker with more unread messages is broken: orders are few, and the largest is one `Assign`."""


class WorkerChannel(FrameStream):
    """One control socket. `on_broken` is called with the reason if the worker breaks the protocol or does not read.

    It is not called if the worker closes the socket, since the process may live on. Its pidfd reports its end.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_broken: Callable[[str], None]
    ) -> None:
        def ended(why: str, closed: bool) -> None:
            if not closed:
                on_broken(why)

        super().__init__(
            sock,
            max_frame_bytes=MAX_FRAME_BYTES,
            max_unsent_bytes=MAX_UNSENT_BYTES,
            on_frame=lambda body: on_message(decode(body)),
            on_end=ended,
        )

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue the message, unless the socket is closed. Duplicates of the descriptors go with its first byte."""
        if self.open:
            self.send_frame(encode(message), fds)
