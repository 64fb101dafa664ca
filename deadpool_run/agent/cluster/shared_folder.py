"""Rendezvous in a folder on a shared disk, for agents that know no address of each other.

The folder holds three kinds of files. *The token* of the run: the first agent makes it, the others read it. *Leaders*: one
file for each term, `leader.<term>`, with the leader's address; only the largest term counts. *The end* of the run, for agents
that come after it. A file is never replaced, so that of several agents that claim a term exactly one gets it.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deadpool_run.agent import atomic_file
from deadpool_run.errors import UsageError

_TOKEN_BYTES = 32
_MAX_BYTES = 4096
_LEADER = "leader."
_END = "end"


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The leader of a run. Port 0: there is none, and the run may be started again."""

    term: int
    address: str
    port: int
    founded: int = 0
    """The term in which the run was last started. The coordinator counts its own terms from there."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ended, for good."""

    exit_code: int
    reason: str


class SharedFolder:
    """The folder of one run, mode 0700. Every agent of the run may open it at any time. Raises `UsageError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._blame():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise UsageError(
                f"{folder} is owned by another user, or others may enter it: they could read the run's token\n"
                "remove it, or choose another place with XDG_STATE_HOME"
            )

    def token(self) -> str:
        """Return the run's token, the same for all agents."""
        with self._blame():
            atomic_file.create(self._folder / "token", secrets.token_hex(_TOKEN_BYTES))
            return self._read("token")

    def leader(self) -> LeaderRecord | None:
        """Return the leader of the latest term; None before the first."""
        with self._blame():
            terms = [int(path.name.removeprefix(_LEADER)) for path in self._folder.glob(f"{_LEADER}[0-9]*")]
            if not terms:
                return None
            found = json.loads(self._read(f"{_LEADER}{max(terms)}"))
            return LeaderRecord(max(terms), str(found["address"]), int(found["port"]), int(found["founded"]))

    def claim(self, leader: LeaderRecord) -> bool:
        """Claim a term; return whether it was free."""
        with self._blame():
            return atomic_file.create(self._folder / f"{_LEADER}{leader.term}", json.dumps(asdict(leader)))

    def leave(self) -> None:
        """Record that the run has no leader and may be started again."""
        last = self.leader()
        if last is not None and last.port:
            self.claim(LeaderRecord(last.term + 1, "", 0))

    def close(self, end: RunEnd) -> None:
        """Record how the run ended, and remove its token."""
        with self._blame():
            atomic_file.create(self._folder / _END, json.dumps(asdict(end)))
            (self._folder / "token").unlink(missing_ok=True)

    def ended(self) -> RunEnd | None:
        """Return how the run ended; None if it has not."""
        with self._blame():
            try:
                found: dict[str, Any] = json.loads(self._read(_END))
            except FileNotFoundError:
                return None
            return RunEnd(int(found["exit_code"]), str(found["reason"]))

    def _read(self, name: str) -> str:
        with (self._folder / name).open(encoding="utf-8") as file:
            return file.read(_MAX_BYTES)

    @contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"{self._folder}, where the nodes of this run meet: {error}\n"
                "it must be on a disk that they share: choose one with XDG_STATE_HOME, or give the nodes a token and the "
                "first one's address (DEADPOOL_TOKEN, --rdzv-endpoint)"
            ) from error
