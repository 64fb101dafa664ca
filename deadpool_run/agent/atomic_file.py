"""Atomic creation and replacement of files: a draft in the same folder is written, then renamed or linked."""

import contextlib
import os
import secrets
from pathlib import Path

PRIVATE = 0o600
PUBLIC = 0o666
"""Modes. The umask applies to the second."""


def replace(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Write the file; it replaces one of its name. Raises OSError."""
    draft = _draft(path, text, mode, durable=False)
    try:
        draft.replace(path)
    except OSError:
        draft.unlink()
        raise


def create(path: Path, text: str) -> bool:
    """Write the file unless its name is taken; return whether it was written. Raises OSError.

    Of several processes that create one file, on NFS too, exactly one does: link(2) is atomic and fails if the name is
    taken. If an NFS server's answer is lost, the kernel asks again and reports that the name is taken, by our own file
    (open(2), O_EXCL). So an error counts only if the draft has no second name.
    """
    draft = _draft(path, text, PRIVATE, durable=True)
    try:
        path.hardlink_to(draft)
    except OSError as error:
        if not _is_linked(draft):
            if isinstance(error, FileExistsError):
                return False
            raise
    finally:
        draft.unlink(missing_ok=True)
    _sync(path.parent)
    return True


def _draft(path: Path, text: str, mode: int, *, durable: bool) -> Path:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor, opened with its mode
            file.write(text)
            if durable:
                file.flush()
                os.fsync(fd)
    except OSError:
        draft.unlink()
        raise
    return draft


def _is_linked(draft: Path) -> bool:
    """Return whether the draft has a second name. An NFS client asks its server at an open, not at a stat."""
    with contextlib.suppress(OSError), draft.open("rb") as file:
        return os.fstat(file.fileno()).st_nlink > 1
    return False


def _sync(folder: Path) -> None:
    """Make the names in the folder survive a power failure, where the file system supports it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
