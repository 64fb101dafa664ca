"""A folder on a disk that all nodes share, where agents that know nothing of each other meet.

Three things are left there. *The token* of the run: whoever comes first makes it, the others read it. *Leaders*: who serves
the run, one file for each term, `leader.<term>`. And its *end*, for those who come after it. A file is written under another
name and then linked to its own (link(2) is atomic and fails if the name is taken, on NFS too), so that nobody reads half of
one, and of several that want a term one gets it. The largest term is the one that counts; files of smaller ones are never
looked at again.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from deadpool_run.errors import UsageError

_TOKEN_BYTES = 32
_MAX_BYTES = 4096
_LEADER = "leader."
_END = "end"


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """Who serves the run. Without a port nobody does: it ended, and may be begun again."""

    term: int
    address: str
    port: int
    founded: int = 0
    """The term in which the run was begun, the last time that it was; the coordinator counts its own terms from there."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ended, for good."""

    exit_code: int
    reason: str


class SharedFolder:
    """The folder of one run, mode 0700; every agent of the run may make one at any time. Raises `UsageError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._blame():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise UsageError(
                f"{folder}: others than you have access to it, and so to the run's token\n"
                "remove it, or choose another place with XDG_STATE_HOME"
            )

    def token(self) -> str:
        """Return the run's token, the same for all agents."""
        with self._blame():
            self._link("token", secrets.token_hex(_TOKEN_BYTES))
            return self._read("token")

    def leader(self) -> LeaderRecord | None:
        """Return who serves the run by the last that was heard; None before anybody does."""
        with self._blame():
            terms = [int(path.name.removeprefix(_LEADER)) for path in self._folder.glob(f"{_LEADER}[0-9]*")]
            if not terms:
                return None
            told = json.loads(self._read(f"{_LEADER}{max(terms)}"))
            return LeaderRecord(max(terms), str(told["address"]), int(told["port"]), int(told["founded"]))

    def claim(self, leader: LeaderRecord) -> bool:
        """Become the leader of a term that nobody has; return whether we do."""
        with self._blame():
            return self._link(f"{_LEADER}{leader.term}", json.dumps(asdict(leader)))

    def leave(self) -> None:
        """Have nobody serve the run, which is to be begun again."""
        last = self.leader()
        if last is not None and last.port:
            self.claim(LeaderRecord(last.term + 1, "", 0))

    def close(self, end: RunEnd) -> None:
        """Say to those who come from now on that the run has ended; the token is of no use any more."""
        with self._blame():
            self._link(_END, json.dumps(asdict(end)))
            (self._folder / "token").unlink(missing_ok=True)

    def ended(self) -> RunEnd | None:
        """Return how the run ended; None if it has not."""
        with self._blame():
            try:
                told: dict[str, Any] = json.loads(self._read(_END))
            except FileNotFoundError:
                return None
            return RunEnd(int(told["exit_code"]), str(told["reason"]))

    def end(self) -> None:
        """Remove what was left here; for the last agent."""
        rmtree(self._folder, ignore_errors=True)

    def _link(self, name: str, text: str) -> bool:
        """Write a file that must not be there yet; return whether it was not."""
        draft = self._folder / f".{name}.{secrets.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor, opened with its mode
                file.write(text)
                file.flush()
                os.fsync(fd)
            (self._folder / name).hardlink_to(draft)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

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
