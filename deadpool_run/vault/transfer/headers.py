"""Headers between vaults: requests and answers around segments, with their bounds.

An owner sends `Put`, and `PartHeader` over further connections. The answer is `Go`, then `HeldVersions` after the segment; or
`HeldVersions` at once, if the content is there already; or `No`. A node with a replacement sends `Get`. The answer is `Have` and
the segment, or `No`; any number of `Wait` come first while the segment is being computed from a parity.
"""

import os
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from deadpool_run.core.settings import MAX_GROUP
from deadpool_run.errors import ProtocolError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.structs import Tagged
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.streams import MAX_PARTS
from deadpool_run.wire.frames import pack
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Peer
from deadpool_run.wire.typed import Decoder, to_json

TOKEN_BYTES = 16
MAX_SEGMENT_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""The memory of this machine."""
_MAX_NUMBER = 1 << 62
MAX_HELD = 3
"""Two slots, and the version that is offered."""

_Number = Annotated[int, Meta(ge=0, lt=_MAX_NUMBER)]
_Rank = Annotated[Rank, Meta(ge=0, lt=_MAX_NUMBER)]
_Version = Annotated[Version, Meta(ge=0, lt=_MAX_NUMBER)]
_Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_SegmentBytes = Annotated[int, Meta(ge=1, lt=MAX_SEGMENT_BYTES)]
_PartCount = Annotated[int, Meta(ge=1, le=MAX_PARTS)]

Identity = tuple[_Version, _Token]
"""A version and the token of its content."""
_Identities = Annotated[list[Identity], Meta(max_length=MAX_HELD)]


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
    group: Annotated[tuple[_Rank, ...], Meta(max_length=MAX_GROUP)] = ()
    """The ranks that share a parity, to which the snapshot is to be added; without them the snapshot itself is kept."""
    home: Peer | None = None
    """Where the snapshot itself is; with a group."""


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


class Wait(Tagged):
    """Says that the segment is being computed; another answer follows."""


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
Answer = Go | No | Wait | HeldVersions | Have
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
    if isinstance(request, Put) and request.group:
        group = request.group
        if list(group) != sorted(set(group)) or request.rank not in group or group[-1] >= world_size:
            raise ProtocolError(f"a group of ranks {group} is none for rank {request.rank} of {world_size}")
        if request.home is None:
            raise ProtocolError(f"rank {request.rank} is offered for a parity by nobody")
    return request


def receive_answer(connection: PeerConnection) -> Answer:
    """Return the answer to a request. Raises OSError and `ProtocolError`."""
    body = framing.receive_frame(connection)
    if body is None:
        raise ConnectionError("the peer hung up")
    return _ANSWERS.decode(body)


def ask(  # noqa: PLR0913 - what is asked for
    connection: PeerConnection, rank: Rank, version: Version | None, timeline: int, *, part: int = 0, of: int
) -> Have:
    """Ask for a part of a segment; return what is announced. The part follows. Raises OSError and `DeadpoolError`."""
    send(connection, Get(rank, version, timeline, part, of))
    while isinstance(answer := receive_answer(connection), Wait):
        pass
    match answer:
        case Have():
            return answer
        case No(why):
            raise SnapshotError(why[:200])
        case _:
            raise ProtocolError(f"a vault answers {type(answer).__name__} to Get")
