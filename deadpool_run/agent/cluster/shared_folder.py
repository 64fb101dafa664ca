"""Rendezvous in a folder on a shared disk, for agents that know no address of each other.

The folder holds three kinds of files. *The token* of the run: the first agent makes it, the others read it. *Leaders*: one
file for each term (`authority.term_files`), with the leader's address; only the largest counts. *The end* of the run, for
agents that come after it.
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
from deadpool_run.agent.authority.claim import RunEnd
from deadpool_run.agent.authority.term_files import TermFiles
from deadpool_run.errors import UsageError

_TOKEN_BYTES = 32
_MAX_BYTES = 4096
_END = "end"


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The leader of a run. Port 0: there is none, and the run may be started again."""

    term: int
    address: str
    port: int
    founded: int = 0
    """The term in which the run was last started. The coordinator counts its own terms from there."""


class SharedFolder:
    """The folder of one run, mode 0700. Every agent of the run may open it at any time. Raises `UsageError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._terms = TermFiles(folder, "leader")
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
            newest = self._terms.newest()
            if newest is None:
                return None
            term, text = newest
            found = json.loads(text)
            return LeaderRecord(term, str(found["address"]), int(found["port"]), int(found["founded"]))

    def claim(self, leader: LeaderRecord) -> bool:
        """Claim a term; return whether it was free, and larger than all others."""
        with self._blame():
            return self._terms.claim(leader.term, json.dumps(asdict(leader)))

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
