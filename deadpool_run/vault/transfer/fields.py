"""What messages between vaults say, checked: everything that comes from a network is of the right type and in bounds."""

import os
from typing import Any

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.transfer.streams import MAX_PARTS

TOKEN_BYTES = 16
_MAX_HELD = 2
_MAX_NUMBER = 1 << 62

MAX_SEGMENT_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""What this machine has memory for at all."""

Identity = tuple[Version, bytes]
"""A version and the token of its content."""


def number(message: dict[str, Any], name: str, *, least: int = 0, below: int = _MAX_NUMBER) -> int:
    """Return an integer of the message. Raises `ProtocolError`."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < below:
        raise ProtocolError(f"a message between vaults says {str(value)[:40]!r} for {name!r}")
    return value


def rank(message: dict[str, Any], world_size: int) -> Rank:
    """Return the rank that the message is about. Raises `ProtocolError`."""
    return Rank(number(message, "rank", below=world_size))


def version(message: dict[str, Any]) -> Version | None:
    """Return the version that the message is about; None: the transcript. Raises `ProtocolError`."""
    return None if message.get("version", 0) is None else Version(number(message, "version"))


def segment_bytes(message: dict[str, Any]) -> int:
    """Return the size of the segment that follows. Raises `ProtocolError`."""
    return number(message, "nbytes", least=1, below=MAX_SEGMENT_BYTES)


def parts(message: dict[str, Any]) -> int:
    """Return into how many parts the segment is cut. Raises `ProtocolError`."""
    return number(message, "of", least=1, below=MAX_PARTS + 1)


def token(value: object) -> bytes:
    """Return a token from its hexadecimal form. Raises `ProtocolError`."""
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != TOKEN_BYTES:
        raise ProtocolError("a message between vaults names no content")
    return found


def identities(value: object) -> list[Identity]:
    """Return what someone holds. Raises `ProtocolError`."""
    if not isinstance(value, list) or len(value) > _MAX_HELD + 1:
        raise ProtocolError("a message between vaults does not say what is held")
    found = []
    for each in value:
        if not isinstance(each, list) or len(each) != 2:
            raise ProtocolError("a message between vaults does not say what is held")
        found.append((Version(number({"version": each[0]}, "version")), token(each[1])))
    return found


def encode(held: list[Identity]) -> list[list[object]]:
    """Return identities in the form in which they are sent."""
    return [[each, content.hex()] for each, content in held]
