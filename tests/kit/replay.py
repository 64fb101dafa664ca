"""Replays a journal: gives its events to the coordinator of this version, and compares the resulting orders."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deadpool_run.coordinator.journal import FORMAT, Entry, Gap, Header
from deadpool_run.core import coordinator
from deadpool_run.core.effects import Effect
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.wire.typed import Decoder


class _Format(msgspec.Struct):
    """The fields that the first line of a journal has in every format."""

    format: int


_FORMAT_DECODER: Decoder[_Format] = Decoder(_Format, "the first line of a journal")
_HEADER_DECODER: Decoder[Header] = Decoder(Header, "the first line of a journal")
_ENTRY_DECODER: Decoder[Entry] = Decoder(Entry, "an entry of a journal")
_GAP_DECODER: Decoder[Gap] = Decoder(Gap, "a gap of a journal")
_GAP = b'{"dropped":'


@dataclass(frozen=True, slots=True)
class Divergence:
    """A line where this version of the coordinator decides differently from the version that wrote the journal."""

    line: int
    entry: Entry
    decided: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a journal."""

    settings: Settings
    state: State
    entries: int
    divergences: tuple[Divergence, ...]
    torn: bool
    """Whether the last line is incomplete because its writer died."""
    dropped: int
    """The number of missing entries."""


def replay(path: Path) -> Replay:
    """Give every event of a journal to a new coordinator. Raises OSError, or `ProtocolError` if the file is no journal."""
    lines = path.read_bytes().split(b"\n")
    torn = bool(lines.pop())
    if not lines:
        raise ProtocolError(f"{path} is not a journal: it has no complete line")
    header = _header(path, lines[0])
    settings, state = header.settings, header.state or coordinator.new_state(header.settings)
    divergences, entries, dropped = [], 0, 0
    for number, entry in _entries(path, lines):
        if isinstance(entry, Gap):
            state, dropped = entry.state, dropped + entry.dropped
            continue
        entries += 1
        effects = coordinator.step(settings, state, entry.event, entry.now)
        if effects != entry.effects:
            divergences.append(Divergence(number, entry, effects))
    return Replay(settings, state, entries, tuple(divergences), torn, dropped)


def _header(path: Path, line: bytes) -> Header:
    try:
        found = _FORMAT_DECODER.decode(line).format
        if found == FORMAT:
            return _HEADER_DECODER.decode(line)
    except ProtocolError as error:
        raise ProtocolError(f"{path}, line 1: {error}") from error
    raise ProtocolError(
        f"{path} is a journal of format {found}, and this version of deadpool-run reads format {FORMAT} only.\n"
        "Replay it with the version of deadpool-run that wrote it."
    )


def _entries(path: Path, lines: Sequence[bytes]) -> Iterator[tuple[int, Entry | Gap]]:
    for number, line in enumerate(lines[1:], start=2):
        try:
            yield number, (_GAP_DECODER if line.startswith(_GAP) else _ENTRY_DECODER).decode(line)
        except ProtocolError as error:
            raise ProtocolError(f"{path}, line {number}: {error}") from error
