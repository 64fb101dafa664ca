"""Headers between vaults: requests and answers around segments, with their bounds.

An owner sends `Put`, and `PartHeader` over further connections. The answer is `Go`, then `HeldVersions` after the segment; or
`HeldVersions` at once, if the content is there already; or `No`. A node with a replacement sends `Get`. The answer is `Have` and
the segment, or `No`.
"""

import os
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank, Version
from deadpool_run.structs import Tagged
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.streams import MAX_PARTS
from deadpool_run.wire.frames import pack
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.typed import Decoder, to_json

TOKEN_BYTES = 16
MAX_SEGMENT_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""The memory of this machine."""
_MAX_NUMBER = 1 << 62
_MAX_HELD = 3
"""Two slots, and the version that is offered."""

_Number = Annotated[int, Meta(ge=0, lt=_MAX_NUMBER)]
_Rank = Annotated[Rank, Meta(ge=0, lt=_MAX_NUMBER)]
_Version = Annotated[Version, Meta(ge=0, lt=_MAX_NUMBER)]
_Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_SegmentBytes = Annotated[int, Meta(ge=1, lt=MAX_SEGMENT_BYTES)]
_PartCount = Annotated[int, Meta(ge=1, le=MAX_PARTS)]

Identity = tuple[_Version, _Token]
"""A version and the token of its content."""
_Identities = Annotated[list[Identity], Meta(max_length=_MAX_HELD)]


class Put(Tagged):
    """Offers a copy of a rank's snapshot, or of its transcript (`version` is None). `held` are the owner's own snapshots."""

    rank: _Rank
    version: _Version | None
    token: _Token
    nbytes: _SegmentBytes
    timeline: _Number
    held: _Identities
    of: _PartCount
    delivery: _Token
    """The first part follows here, the others after their `PartHeader`."""


class PartHeader(Tagged):
    """Announces part `part` of `of` of a delivery, over a connection of its own. The bytes follow."""

    delivery: _Token
    part: Annotated[int, Meta(ge=1)]
    of: _PartCount


class Get(Tagged):
    """Asks for a part of a rank's snapshot, or of its transcript (`version` is None), in up to `of` parts."""

    rank: _Rank
    version: _Version | None
    timeline: _Number
    part: _Number
    of: _PartCount


class Go(Tagged):
    """Asks for the offered segment."""


class No(Tagged):
    """Refuses a request."""

    why: str
    no_memory: bool = False
    """There is no memory for the offered copy."""


class HeldVersions(Tagged):
    """Lists what is held of the rank now: its versions, and the token of its transcript."""

    held: _Identities
    transcript: _Token | None


class Have(Tagged):
    """Announces a segment of `of` parts. The requested part follows."""

    nbytes: _SegmentBytes
    token: _Token
    of: _PartCount


Request = Put | PartHeader | Get
Answer = Go | No | HeldVersions | Have
_REQUESTS: Decoder[Request] = Decoder(Request, "a request between vaults")
_ANSWERS: Decoder[Answer] = Decoder(Answer, "an answer between vaults")


def send(connection: PeerConnection, header: Request | Answer) -> None:
    """Send a header. Raises OSError."""
    connection.send(pack(to_json(header), framing.MAX_FRAME_BYTES))


def receive_request(connection: PeerConnection, world_size: int, idle: Callable[[], bool]) -> Request | None:
    """Return the next request, or None if the peer hung up before it, as `framing.receive_frame` does."""
    body = framing.receive_frame(connection, idle=idle)
    if body is None:
        return None
    request = _REQUESTS.decode(body)
    if not isinstance(request, PartHeader) and request.rank >= world_size:
        raise ProtocolError(f"a request between vaults is about rank {request.rank}, and there are {world_size}")
    return request


def receive_answer(connection: PeerConnection) -> Answer:
    """Return the answer to a request. Raises OSError and `ProtocolError`."""
    body = framing.receive_frame(connection)
    if body is None:
        raise ConnectionError("the peer hung up")
    return _ANSWERS.decode(body)
