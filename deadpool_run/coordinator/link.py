"""A connection between two agents: messages of `wire.peers`."""

import socket
from collections.abc import Callable

from deadpool_run.coordinator.frame_stream import FrameStream
from deadpool_run.errors import ProtocolError
from deadpool_run.wire.peers import MAX_FRAME_BYTES, Message, decode, encode

MAX_UNSENT_BYTES = 64 << 20
"""A peer with more than this in its queue counts as silent."""


class PeerLink(FrameStream):
    """An authenticated connection. It does not judge whether a peer is silent: that depends on what the peer has to send.

    `on_lost` is called once with the reason, and whether the peer closed the connection. That proves nothing about the peer.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_lost: Callable[[str, bool], None]
    ) -> None:
        self._on_message = on_message
        self.broke_protocol = False
        """The peer sent what it may not."""
        super().__init__(
            sock,
            max_frame_bytes=MAX_FRAME_BYTES,
            max_unsent_bytes=MAX_UNSENT_BYTES,
            on_frame=self._frame,
            on_end=on_lost,
        )

    def _frame(self, body: bytes) -> None:
        try:
            self._on_message(decode(body))
        except ProtocolError:
            self.broke_protocol = True
            raise

    def send(self, message: Message) -> None:
        """Queue the message, unless the connection has ended."""
        if self.open:
            self.send_frame(encode(message))
