"""Storage of durable checkpoints: a directory, or a URL through fsspec.

In a directory, a rename makes a complete checkpoint appear after it was synced to disk. Object stores have no rename, so
their checkpoint is complete once it has a record, which is written last.
"""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from deadpool_run.errors import CheckpointError
from deadpool_run.ids import Version
from deadpool_run.text import without_passwords
from deadpool_run.vault import checkpoint_format
from deadpool_run.worker.compat import checkpoints


class Storage:
    """The checkpoints in one directory. Paths are `name` or `name/file`. All methods raise OSError.

    What is only to be removed hinders no checkpoint: `uncleaned` has the reports of what could not be.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.uncleaned: list[str] = []

    def where(self, path: str = "") -> str:
        """Return a path as shown in messages."""
        return str(self._root / path)

    def names(self) -> list[str]:
        """Return the names in it; none if it does not exist."""
        return sorted(entry.name for entry in self._root.iterdir() if entry.is_dir()) if self._root.is_dir() else []

    def versions(self) -> list[Version]:
        """Return the versions of the checkpoints in it, oldest first.

        One without a record is damaged or another program's: what was cut off never gets the name of a checkpoint.
        """
        return checkpoint_format.versions_in(self.names())

    def has_record(self, name: str) -> bool:
        """Return whether this checkpoint has a record."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self._root / name / checkpoint_format.RECORD).stat()
            return True
        return False

    def prepare(self) -> None:
        """Create the directory, so that a job fails before training if it cannot write there."""
        self._root.mkdir(parents=True, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write checkpoints", str(self._root))

    def begin(self, name: str, attempt: str) -> None:
        """Create a checkpoint's directory, under its temporary name. Removes leftovers of killed writers."""
        self.prepare()
        for each in sorted(path.name for path in self._root.iterdir()):
            if checkpoint_format.leftover(each):
                self._delete(each)
        (self._root / self.unfinished(name, attempt)).mkdir()

    def unfinished(self, name: str, attempt: str) -> str:
        """Return the checkpoint's name until it is complete. `attempt` is unique."""
        return f"{name}.{attempt}{checkpoint_format.UNFINISHED}"

    def writer(self, name: str) -> Any:
        """Return torch's `StorageWriter` for this name."""
        return FileSystemWriter(self._root / name, per_thread_copy_ahead=0)

    def put(self, path: str, data: bytes) -> None:
        """Write a file, and sync it to disk."""
        with (self._root / path).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def complete(self, unfinished: str, name: str) -> None:
        """Turn `unfinished` into the checkpoint `name`."""
        _sync(self._root / unfinished)
        final, former = self._root / name, ""
        if os.path.lexists(final):  # rejected when the job started, and now written again
            former = self._supersede(name)
        (self._root / unfinished).rename(final)
        _sync(self._root)
        if former:
            self._delete(former)

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading, with seek."""
        return (self._root / path).open("rb")

    def discard(self, path: str) -> None:
        """Remove a file that is of no more use."""
        with self.cleaning(path):
            (self._root / path).unlink()

    def remove(self, name: str) -> None:
        """Remove a checkpoint."""
        with self.cleaning(name):
            self._delete(self._supersede(name))

    def _supersede(self, name: str) -> str:
        """Rename a checkpoint, so that a half-removed one is not mistaken for a checkpoint; return its name now."""
        doomed = f"{name}.{uuid.uuid4().hex[:8]}{checkpoint_format.SUPERSEDED}"  # another than those of leftovers
        (self._root / name).rename(self._root / doomed)
        return doomed

    def _delete(self, name: str) -> None:
        """Remove a directory. Of a link only the link itself: what it leads to may be anyone's."""
        path = self._root / name
        with self.cleaning(name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    @contextlib.contextmanager
    def cleaning(self, path: str) -> Iterator[None]:
        """Report a failure to remove something here, and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - fsspec's storage may raise anything
            why = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            self.uncleaned.append(without_passwords(f"{self.where(path)} could not be cleaned up: {why}"))


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _RemoteStorage(Storage):
    """The checkpoints at a URL."""

    def __init__(self, url: str) -> None:
        self.uncleaned = []
        self._url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415 - only URLs need it

            self._fs, self._root = url_to_fs(self._url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: {error}.\nRun pip install 'deadpool-run[fsspec]', and install the fsspec package for this kind of URL."
            ) from error

    def where(self, path: str = "") -> str:
        return f"{self._url}/{path}" if path else self._url

    def names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def versions(self) -> list[Version]:
        return [version for version in super().versions() if self.has_record(checkpoint_format.name_of(version))]

    def has_record(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # `exists` would hide any other failure
            self._fs.info(self._path(f"{name}/{checkpoint_format.RECORD}"))
            return True
        return False

    def prepare(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def begin(self, name: str, attempt: str) -> None:  # noqa: ARG002 - as below
        self._drop_record(name)
        self._delete(name)  # had no record, or was rejected
        self._fs.makedirs(self._path(name), exist_ok=True)

    def unfinished(self, name: str, attempt: str) -> str:  # noqa: ARG002 - no rename: the name is the final one
        return name

    def writer(self, name: str) -> Any:
        return checkpoints.remote_writer(self.where(name))

    def put(self, path: str, data: bytes) -> None:
        with self._fs.open(self._path(path), "wb") as file:
            file.write(data)

    def complete(self, unfinished: str, name: str) -> None:
        assert unfinished == name

    def open(self, path: str) -> IO[bytes]:
        file: IO[bytes] = self._fs.open(self._path(path), "rb")
        return file

    def discard(self, path: str) -> None:
        with self.cleaning(path):
            self._fs.rm(self._path(path))

    def remove(self, name: str) -> None:
        with self.cleaning(name):
            self._drop_record(name)  # first: without it the rest is no checkpoint
            self._delete(name)

    def _drop_record(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(f"{name}/{checkpoint_format.RECORD}"))

    def _delete(self, name: str) -> None:
        with self.cleaning(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"


def storage_at(target: str) -> Storage:
    """Return the storage at a directory or URL. Raises `CheckpointError` if fsspec cannot open the URL."""
    return _RemoteStorage(target) if "://" in target else Storage(Path(target))
