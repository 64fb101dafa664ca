"""An authenticated connection between two agents: the socket, and the taggers of both directions."""

import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass

from deadpool_run.wire.tags import Tagger


@dataclass(frozen=True, slots=True, eq=False)
class PeerConnection(AbstractContextManager["PeerConnection"]):
    """The result of a greeting. Everything sent or received on the socket is tagged, in order."""

    sock: socket.socket
    sending: Tagger
    receiving: Tagger

    def send(self, *frames: bytes) -> None:
        """Send frames at once, each with its tag. Blocking. Raises OSError."""
        self.sock.sendall(b"".join(frame + self.sending.tag(frame) for frame in frames))

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def __exit__(self, *_: object) -> None:
        self.close()
