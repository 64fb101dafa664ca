"""The journal: every event with its time and the orders that followed, as JSON lines that replay to the same state.

The first line names the format and holds the settings. A failure in the field becomes a test by its journal alone.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_run.core import coordinator
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import typed
from deadpool_run.wire.facts import decode_effect, decode_event, encode
from deadpool_run.wire.frames import to_json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One call of `coordinator.step`: what it was told, and what it ordered."""

    now: float
    event: Event
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Divergence:
    """A line at which this version of the coordinator decides otherwise than the one that wrote the journal."""

    line: int
    entry: Entry
    decided: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a journal led to."""

    settings: Settings
    state: State
    entries: int
    divergences: tuple[Divergence, ...]
    torn: bool
    """The last line is incomplete: whoever wrote it died."""


class Journal:
    """An append-only file that only its owner can read. Created here; a file that is there already is refused.

    A job never ends for its journal: once a line cannot be written (the disk is full), none is any more, and `failure`
    says why.
    """

    def __init__(self, path: Path, settings: Settings, state: State | None = None) -> None:
        """Create the file. Raises OSError (FileExistsError if there is one already). `state` is what it begins with."""
        self.failure: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        begins = None if state is None else typed.plain(state)
        self._append({"format": FORMAT, "settings": typed.plain(settings), "state": begins})

    def append(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        """Append one line."""
        self._append({"now": now, "event": encode(event), "effects": [encode(effect) for effect in effects]})

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: Mapping[str, Any]) -> None:
        rest = to_json(line).encode() + b"\n"
        try:
            while rest and self.failure is None:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.failure = error


def replay(path: Path) -> Replay:
    """Tell a fresh coordinator all that the journal's was told. Raises OSError, and ProtocolError if it is no journal."""
    lines = path.read_bytes().split(b"\n")
    torn = bool(lines.pop())
    if not lines:
        raise ProtocolError(f"{path} is not a journal: it has no complete line")
    settings, state = _header(lines[0])
    divergences = []
    for number, entry in _entries(lines):
        effects = coordinator.step(settings, state, entry.event, entry.now)
        if effects != entry.effects:
            divergences.append(Divergence(number, entry, effects))
    return Replay(settings, state, len(lines) - 1, tuple(divergences), torn)


def _header(line: bytes) -> tuple[Settings, State]:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise ProtocolError(f"a journal of format {header['format']}; this version reads format {FORMAT}")
        settings = Settings(**header["settings"])
        begins = header.get("state")
        return settings, coordinator.new_state(settings) if begins is None else typed.build(State, begins)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"the first line is not that of a journal: {line[:80]!r}") from error


def _entries(lines: Sequence[bytes]) -> Iterator[tuple[int, Entry]]:
    for number, line in enumerate(lines[1:], start=2):
        try:
            parts = json.loads(line)
            effects = tuple(decode_effect(effect) for effect in parts["effects"])
            yield number, Entry(float(parts["now"]), decode_event(parts["event"]), effects)
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"line {number} is not that of a journal: {line[:80]!r}") from error
