"""Files that a run for practice would overwrite: it writes to copies, which are dropped when it is over.

A replacement runs set-up and the first two steps again, and so would write the weights of step 0 over the best ones so far, which a
later step may read. Files that did not exist are written in place, because later steps need them, too.

A step that a loss has interrupted goes on with wrong results to its end. What it writes from there is treated alike, and files that
it makes are removed: the step is repeated.

In the trial all ranks run at once, and one may load in a step what another one has saved in it. So only files that the run appends
to, or has read before it writes them, are copied there: the second run must find them as the first one did.

The functions with which Python and torch open files are replaced meanwhile, those of libraries in C or Rust mostly not. A hook for
audit events would see more of them, but it stays for the life of a process, and costs 1.3 us for each event.
"""

import builtins
import errno
import fcntl
import io
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import wraps
from typing import Any
from weakref import WeakSet

from deadpool_run.worker.compat.writers import writers_of_files

MOST_COPIED = 64 << 20
"""Bytes of a file that is changed without being truncated. A larger one is changed in place."""
_MOST_COPIES = 256


class Kind(Enum):
    """The kinds of runs that do not count."""

    REHEARSAL = "rehearsal"
    TRIAL = "trial"
    INTERRUPTED = "interrupted"
    """The rest of a step in which a peer was lost."""


class FileCopies:
    """The copies of one run for practice. Not for processes that are forked meanwhile."""

    def __init__(self) -> None:
        self._pid, self._kind = 0, Kind.REHEARSAL
        self._copies: dict[str, int | None] = {}
        """By path: the descriptor of a file without a name; None for a file that the run has removed."""
        self._new: set[str] = set()
        self._read: set[str] = set()
        self._opened: WeakSet[io.IOBase] = WeakSet()
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    @property
    def active(self) -> bool:
        """Whether this process runs for practice, and was not forked meanwhile."""
        return self._pid == os.getpid()

    def _is_ours(self) -> bool:
        """Whether this thread runs for practice. In an interrupted step, another one may save the state of an earlier step."""
        is_main = threading.current_thread() is threading.main_thread()
        return self.active and (is_main or self._kind is not Kind.INTERRUPTED)

    def begin(self, kind: Kind) -> None:
        """Write to copies from now on. A trial may become another kind; a rehearsal stays one. Any thread."""
        if self.active:
            if self._kind is Kind.TRIAL:
                self._kind = kind
            return
        self._pid, self._kind = os.getpid(), kind
        opening = self._opening(builtins.open)
        for owner in (builtins, io):
            self._replace(owner, "open", opening)
        self._replace(os, "open", self._opening_fd(os.open))
        for name in ("rename", "replace"):
            self._replace(os, name, self._renaming(getattr(os, name)))
        for name in ("remove", "unlink"):
            self._replace(os, name, self._removing(getattr(os, name)))
        self.replace_writers()

    def replace_writers(self) -> None:
        """Replace the functions of libraries that were imported since the run began."""
        known = [(owner, name) for owner, name, _, _ in self._replaced]
        for owner, name, position in writers_of_files() if self.active else ():
            if (owner, name) not in known:
                self._replace(owner, name, self._writing(getattr(owner, name), position))

    def end(self) -> None:
        """Drop the copies. What is still open on one goes on at the end of the file itself, as a log does. Any thread."""
        if not self.active:
            return
        self._pid = 0
        for owner, name, original, ours in self._replaced:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        for opened in list(self._opened):
            with suppress(OSError, ValueError):  # it is closed, or its disk is full
                opened.flush()
        for path, fd in list(self._copies.items()):
            if fd is not None:
                _move_to(path, fd)
                os.close(fd)
        for path in self._new if self._kind is Kind.INTERRUPTED else ():
            with suppress(OSError):  # it was renamed, or removed
                if not _open_on(os.stat(path)):  # noqa: PTH116
                    os.unlink(path)  # noqa: PTH108
        self._copies, self._new, self._read, self._opened, self._replaced = {}, set(), set(), WeakSet(), []

    def end_interrupted(self) -> None:
        """End if the run was the rest of an interrupted step."""
        if self._kind is Kind.INTERRUPTED:
            self.end()

    def place_of(self, file: Any, *, writes: bool, truncates: bool) -> str | None:
        """Return where to open a file instead; None for the file itself. Raises FileNotFoundError if the run has removed it."""
        if not self._is_ours() or not isinstance(file, str | bytes | os.PathLike):
            return None
        if self._kind is not Kind.TRIAL and not (writes or self._copies):  # a set-up may read a million files
            return None
        path = os.path.realpath(os.fsdecode(file))
        if path not in self._copies:
            if writes:
                return self._copied(path, truncates=truncates)
            self._read.add(path)
            return None
        if self._copies[path] is None:
            if not writes:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
            self._copies[path] = _nameless(path)
        return f"/proc/self/fd/{self._copies[path]}"

    def _copied(self, path: str, *, truncates: bool) -> str | None:
        try:
            found = os.stat(path)  # noqa: PTH116 - as in the rest of this module, no method that may be replaced
        except OSError:
            self._new.add(path)
            return None
        # An empty file has nothing to lose. It may be a lock, which is one only under its own name.
        is_kept = stat.S_ISREG(found.st_mode) and found.st_size and path not in self._new
        is_kept = is_kept and (self._kind is not Kind.TRIAL or not truncates or path in self._read)
        if not is_kept or len(self._copies) >= _MOST_COPIES or not (truncates or found.st_size <= MOST_COPIED):
            return None
        fd = _nameless(path)
        self._copies[path] = fd
        if not truncates:
            _copy(path, fd)
        return f"/proc/self/fd/{fd}"

    def _note_new(self, file: Any) -> None:
        """Note a file that is opened only if it does not exist."""
        if self._is_ours() and isinstance(file, str | bytes | os.PathLike) and not os.path.exists(file):  # noqa: PTH110
            self._new.add(os.path.realpath(os.fsdecode(file)))

    # --- functions of Python and torch -----------------------------------------------------------------------------

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        self._replaced.append((owner, name, getattr(owner, name), ours))
        setattr(owner, name, ours)

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def opening(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and "x" in mode:
                self._note_new(file)
                return original(file, mode, *args, **kwargs)
            writes = isinstance(mode, str) and any(sign in mode for sign in "wa+")
            place = self.place_of(file, writes=writes, truncates=writes and "w" in mode)
            if place is None:
                return original(file, mode, *args, **kwargs)
            opened = original(place, mode, *args, **kwargs)
            self._opened.add(opened)
            return opened

        return opening

    def _opening_fd(self, original: Callable[..., int]) -> Callable[..., int]:
        @wraps(original)
        def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            place = None
            if flags & os.O_EXCL and kwargs.get("dir_fd") is None:
                self._note_new(path)
            elif kwargs.get("dir_fd") is None and not flags & (os.O_NOFOLLOW | os.O_DIRECTORY):
                writes = flags & os.O_ACCMODE != os.O_RDONLY
                place = self.place_of(path, writes=writes, truncates=bool(flags & os.O_TRUNC))
            return original(path if place is None else place, flags, *args, **kwargs)

        return opening

    def _writing(self, original: Callable[..., Any], position: int) -> Callable[..., Any]:
        @wraps(original)
        def writing(*args: Any, **kwargs: Any) -> Any:
            if len(args) > position:
                place = self.place_of(args[position], writes=True, truncates=True)
                if place is not None:
                    args = (*args[:position], place, *args[position + 1 :])
            return original(*args, **kwargs)

        return writing

    def _renaming(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def renaming(src: Any, dst: Any, **kwargs: Any) -> None:
            if not (self._is_ours() and not kwargs and self._renamed(_entry(src), _entry(dst))):
                original(src, dst, **kwargs)

        return renaming

    def _renamed(self, source: str, target: str) -> bool:
        """Rename in the copies; False if the files themselves are to be renamed."""
        if source in self._copies:
            fd = self._copies[source]
            if fd is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            self._copies[source] = None
        elif not _is_file(source):
            return False
        elif source in self._new:
            is_kept = target in self._copies or (
                _is_file(target) and (self._kind is not Kind.TRIAL or target in self._read)
            )
            if target in self._new or not is_kept:
                self._new.discard(source)
                self._new.add(target)
                return False
            fd = os.open(source, os.O_RDWR)
            os.unlink(source)  # noqa: PTH108
            self._new.discard(source)
        elif os.path.getsize(source) <= MOST_COPIED:  # noqa: PTH202
            fd = _nameless(target)
            _copy(source, fd)
            self._copies[source] = None
        else:
            return False
        if (earlier := self._copies.get(target)) is not None:
            os.close(earlier)
        self._copies[target] = fd
        return True

    def _removing(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def removing(path: Any, **kwargs: Any) -> None:
            if self._is_ours() and not kwargs and (entry := _entry(path)) in self._copies:
                if (fd := self._copies[entry]) is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                os.close(fd)
                self._copies[entry] = None
                return
            original(path, **kwargs)

        return removing


def _entry(path: Any) -> str:
    """Return the path of a name in its folder. The name may be a link, which is not followed."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
    return os.path.join(os.path.realpath(folder), name)  # noqa: PTH118


def _is_file(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)  # noqa: PTH113, PTH114


def _nameless(path: str) -> int:
    """Return the descriptor of a new file on the same disk, if that can be written, without a name."""
    try:
        fd, made = tempfile.mkstemp(prefix=".deadpool-practice-", dir=os.path.dirname(path))  # noqa: PTH120
    except OSError:
        fd, made = tempfile.mkstemp(prefix="deadpool-practice-")
    os.unlink(made)  # noqa: PTH108
    return fd


def _copy(path: str, fd: int) -> None:
    with io.FileIO(path) as source, io.FileIO(fd, "wb", closefd=False) as target:
        shutil.copyfileobj(source, target)


def _open_on(found: os.stat_result) -> list[int]:
    """Return the descriptors of this process on a file."""
    fds = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # that of the listing is closed by now
            if os.path.samestat(os.fstat(int(name)), found):
                fds.append(int(name))
    return fds


def _move_to(path: str, copy: int) -> None:
    """Have descriptors of a copy refer to the file itself: at its end, or where they are if they only read."""
    for fd in _open_on(os.fstat(copy)):
        if fd == copy:
            continue
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        with suppress(OSError):  # the folder is gone, say: what is written there is lost
            own = os.open(path, mode | os.O_CLOEXEC | (0 if mode == os.O_RDONLY else os.O_APPEND | os.O_CREAT), 0o666)
            if mode == os.O_RDONLY:
                os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, fd, inheritable=os.get_inheritable(fd))
            os.close(own)


file_copies = FileCopies()
"""Of this process, as `open` is."""
