"""Tags: each frame or bundle after the greeting carries a tag, so that no third party can change what two agents send.

A tag is keyed BLAKE3 over the frame's number and the frame. Both ends count the frames of each direction, so the number itself
is not sent. A frame that was altered, lost, repeated or moved has another tag than the one that is due.
"""

import hmac

from blake3 import blake3

from deadpool_run.errors import TamperedError

KEY_BYTES = 32
TAG_BYTES = 16
"""128 bits: a forger has one try, because a wrong tag ends the connection."""
_NUMBER_BYTES = 8


class Tagger:
    """Makes and checks the tags of one direction of one connection. Not thread-safe: the frames have an order."""

    def __init__(self, key: bytes) -> None:
        """Begin with frame 0. `key` is of this connection and this direction only."""
        self._key = key
        self._number = 0

    def tag(self, frame: bytes | memoryview) -> bytes:
        """Return the tag of the next frame. Send it after the frame."""
        keyed = blake3(self._number.to_bytes(_NUMBER_BYTES, "big"), key=self._key)
        keyed.update(frame)
        self._number += 1
        return keyed.digest(TAG_BYTES)

    def check(self, frame: bytes | memoryview, tag: bytes) -> None:
        """Take the next frame. Raises `TamperedError` if it is not what the peer sent in its turn."""
        number = self._number
        if not hmac.compare_digest(self.tag(frame), tag):
            raise TamperedError(f"frame {number} of the connection was altered, lost, repeated or moved on its way")
