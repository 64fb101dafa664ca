"""Base classes of everything that is encoded: events, effects, messages and their parts."""

from typing import Annotated, dataclass_transform

import msgspec

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
"""A TCP port. Decoding refuses any other number: sockets raise OverflowError."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Untagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An immutable part of a message. Decoding refuses fields that the class does not have.

    Python does not look for cycles in them: what comes from JSON, or is made of it, has none.
    """


class Tagged(Untagged, frozen=True, tag=True):
    """An `Untagged` whose encoding names its class in the field `type`, so that it can be one of a union."""
