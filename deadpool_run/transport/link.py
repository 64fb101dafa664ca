"""A connection between two agents: messages of `wire.peers`."""

import socket
from collections.abc import Callable

from deadpool_run.transport.message_stream import MessageStream
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import FORMAT, Message

MAX_UNSENT_BYTES = 64 << 20
"""A peer with more than this in its queue counts as silent."""


class PeerLink(MessageStream[Message]):
    """An authenticated connection. It does not judge whether a peer is silent: that depends on what the peer has to send.

    `on_end` is that of a `MessageStream`. That a peer closed the connection proves nothing about the peer.
    """

    def __init__(
        self,
        connection: PeerConnection,
        on_message: Callable[[Message], None],
        on_end: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        super().__init__(
            connection.sock,
            FORMAT,
            MAX_UNSENT_BYTES,
            on_message,
            on_end,
            sending=connection.sending,
            receiving=connection.receiving,
        )

    def expect_word_within(self, seconds: float) -> None:
        """Have the kernel ask the peer's after this long a silence, whole seconds, whether it still knows the connection (tcp(7)).

        If it does not, as after a firewall's reset, `on_end` is called at once. A peer that is only busy, or stopped, costs nothing.
        """
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def address(self) -> str:
        """The peer's address, an IP literal; empty if the connection has broken, and its end is not handled yet."""
        try:
            return str(self._sock.getpeername()[0])
        except OSError:
            return ""
