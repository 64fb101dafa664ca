"""Copies the memory that a replacement will write first, while it is a spare that waits.

A forked worker shares all pages with the fork server, and its first write to each makes the kernel copy it. Set-up and the first steps
write some 5,000 pages, because using a Python object writes its reference count. Workers are forked from one process, so the same
pages are at the same addresses in all of them. The first workers mark the pages that they have copied, and spares copy these.
"""

import ctypes
import mmap
import os
import re
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path

from deadpool_run.vault.segments import create_memory

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_LIBC = ctypes.CDLL(None)
_ENTRY_BYTES = 8
"""Of /proc/self/pagemap, which has 64 bits for each page (proc(5))."""
_HIGH_BYTE = 7 if sys.byteorder == "little" else 0
_PRESENT, _OF_A_FILE, _EXCLUSIVE = 0x80, 0x20, 0x01
"""Bits 63, 61 and 56 of an entry. A page that this process has copied is its own alone, and no file's."""
_TO_MARKS = bytes(byte & (_PRESENT | _OF_A_FILE | _EXCLUSIVE) == _PRESENT | _EXCLUSIVE for byte in range(256))
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 64.0
"""A spare that is forked during a repair does not take time from it."""


class CopiedPages:
    """The pages of a process that its forks copy first. Made before they are forked, and shared by them."""

    def __init__(self) -> None:
        """Begin with the private memory that this process has now. Without /proc there is none."""
        maps = ""
        with suppress(OSError):
            maps = Path("/proc/self/maps").read_text()
        self._ranges = [*_private(maps)]
        self._marks = _shared_memory(1 + sum(pages for _, pages in self._ranges))
        """A byte for each page of the ranges in turn, and one that says whether a process has marked its own."""

    def mark(self) -> None:
        """Mark the pages that this process has copied, unless another one has done that."""
        if self._marks[-1]:
            return
        at = 0
        with suppress(OSError), Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            for start, pages in self._ranges:
                entries = os.pread(pagemap.fileno(), pages * _ENTRY_BYTES, start // mmap.PAGESIZE * _ENTRY_BYTES)
                marks = entries[_HIGH_BYTE::_ENTRY_BYTES].translate(_TO_MARKS)
                self._marks[at : at + len(marks)] = marks
                at += pages
        self._marks[-1] = 1

    def copy(self) -> bool:
        """Copy the marked pages into this process; False if none are marked yet. What cannot be copied is left shared."""
        if not self._marks[-1]:
            return False
        at = 0
        for start, pages in self._ranges:
            for found in re.finditer(rb"\x01+", self._marks[at : at + pages]):
                where, length = start + found.start() * mmap.PAGESIZE, len(found[0]) * mmap.PAGESIZE
                _LIBC.madvise(ctypes.c_void_p(where), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)
            at += pages
        return True


_pages: CopiedPages | None = None
"""None in a process that was not forked from one that began."""


def begin() -> None:
    """Have the forks of this process share marks. For the fork server, when it has imported everything."""
    global _pages  # noqa: PLW0603 - the memory of this process
    _pages = CopiedPages()


def mark() -> None:
    """Mark the pages that this worker has copied, if it is the first one. For a worker after its first steps."""
    if _pages is not None:
        _pages.mark()


def wait(control: socket.socket) -> None:
    """Wait until the agent sends something, and meanwhile copy the marked pages once."""
    orders = select.poll()
    orders.register(control, select.POLLIN)
    wait_s = _FIRST_WAIT_S
    while _pages is not None and not orders.poll(1e3 * wait_s) and not _pages.copy():
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _shared_memory(nbytes: int) -> mmap.mmap:
    """Return memory that forks share, under a name by which it is known as the launcher's own."""
    fd = create_memory("copied-pages")
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _private(maps: str) -> list[tuple[int, int]]:
    """Return the addresses and lengths in pages of the private writable ranges in /proc/self/maps, except the stack."""
    found = []
    for line in maps.splitlines():
        addresses, permissions, *_, name = line.split(maxsplit=5)
        if permissions == "rw-p" and name != "[stack]":
            start, stop = (int(address, 16) for address in addresses.split("-"))
            found.append((start, (stop - start) // mmap.PAGESIZE))
    return found
