"""Memory that several ranks of a node map and may write: `multiprocessing.shared_memory`, or one file in memory.

A snapshot has the variables of one rank between two of its steps. Other ranks write to such memory at other times, and a restore
would undo what they have written since. So values there are kept only while nobody writes to that memory.
"""

import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from deadpool_run.procfs import children_of
from deadpool_run.worker.variables.values.views import address_of_array

_LOOKED_UP_EVERY_S = 60.0
"""Between two looks at the maps of all ranks of a node: milliseconds each."""
_WRITABLE = re.compile(rb"^(\w+)-(\w+) .w.s \w+ (\S+) (\d+) *(.*)$", re.MULTILINE)
_OTHERS = (b"/dev/", b"/memfd:deadpool-")
"""The beginnings of names of devices, which have one inode for all that is mapped of them, and of the launcher's own memory."""
_MEMORY = (b"/dev/shm/", b"/dev/zero")
"""Memory whose name is that of a device."""

_File = tuple[bytes, bytes]
"""The device and the inode of what is mapped."""


class _Range(NamedTuple):
    start: int
    end: int
    file: _File


class SharedMappings:
    """The memory of this process that other ranks of the node can write, and whether they do."""

    def __init__(self, others: Callable[[], Iterator[int]] | None = None) -> None:
        """`others` yields the process ids of the node's other ranks: by default, of all processes with this one's parent."""
        self._others = others or _siblings
        self._own, self._shared = _Ranges(()), _Ranges(())
        self._first: dict[tuple[int, Hashable], int] = {}
        """Digests by address, and what of it they are of."""
        self._written: set[_File] = set()
        self._due = 0.0

    def look(self, *, thorough: bool) -> None:
        """Find memory that is shared now, if `thorough`, or if that was a minute ago."""
        if not thorough and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _LOOKED_UP_EVERY_S
        own = sorted(_mapped(os.getpid()))
        others = {each.file for pid in self._others() for each in _mapped(pid)} if own else set()
        self._own, self._shared = _Ranges(own), _Ranges(each for each in own if each.file in others)

    def note(self, value: Any, what: Hashable, digest: Callable[[], int]) -> None:
        """Note what a tensor or an array has when the loop begins. `digest` is only called if others may come to share it.

        `what` tells apart digests of values at one address.
        """
        if self._own.file_at(address := _address_of(value)) is not None:
            self._first[address, what] = digest()

    def may_be_kept(self, value: Any, what: Hashable, digest: Callable[[], int]) -> bool:
        """Return whether a tensor or an array is out of reach of other ranks, or in memory that nobody has written to since."""
        file = self._shared.file_at(address := _address_of(value))
        if file is None:
            return True
        first = self._first.get((address, what))
        if file in self._written or first is None:
            return False
        if first != digest():
            self._written.add(file)
        return file not in self._written


class _Ranges:
    """Ranges of memory that do not overlap, in order."""

    def __init__(self, ranges: Iterable[_Range]) -> None:
        self._ranges = list(ranges)
        self._starts = [each.start for each in self._ranges]

    def file_at(self, address: int) -> _File | None:
        """Return what is mapped at an address; None if it is in none of these."""
        index = bisect_right(self._starts, address) - 1
        return self._ranges[index].file if index >= 0 and address < self._ranges[index].end else None


def _address_of(value: Any) -> int:
    """Return where a tensor in main memory or an array begins; 0 for a tensor elsewhere, and for an array with its own memory."""
    if isinstance(value, Tensor):
        return value.data_ptr() if value.device.type == "cpu" else 0
    return 0 if value.flags.owndata else address_of_array(value)


def _mapped(pid: int) -> Iterator[_Range]:
    """Yield the memory that a process shares with others and can write (proc_pid_maps(5)); nothing if it has ended."""
    with suppress(OSError):
        for start, end, device, inode, name in _WRITABLE.findall(Path(f"/proc/{pid}/maps").read_bytes()):
            if not name.startswith(_OTHERS) or name.startswith(_MEMORY):
                yield _Range(int(start, 16), int(end, 16), (device, inode))


def _siblings() -> Iterator[int]:
    """Yield the other children of this process's parent, which starts the ranks of a node."""
    with suppress(OSError):  # proc(5) may be hidden
        yield from children_of(os.getppid()) - {os.getpid()}
