"""The folder of one run on a shared disk, mode 0700: it holds the run's token, and an external authority's records.

The first agent makes the token, and the others read it.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deadpool_run.agent import atomic_file
from deadpool_run.errors import UsageError

_TOKEN_BYTES = 32
_MAX_BYTES = 4096


class SharedFolder:
    """Every agent of the run may open it at any time. Raises `UsageError`."""

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
            with (self._folder / "token").open(encoding="utf-8") as file:
                return file.read(_MAX_BYTES)

    def remove_token(self) -> None:
        """Remove it, since the run is over."""
        with self._blame():
            (self._folder / "token").unlink(missing_ok=True)

    @contextmanager
    def _blame(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"{self._folder}, where the nodes of this run meet: {error}\n"
                "it must be on a disk that they share: choose one with XDG_STATE_HOME, or give the nodes a token and the "
                "first one's address (DEADPOOL_TOKEN, --rdzv-endpoint)"
            ) from error
