"""Finds out from the kernel whether memory was written, so that large values need not be compared in each step.

The kernel protects pages against writing, and at the first write to one it notes that and lets the write go on: userfaultfd(2) in
its asynchronous mode, and PAGEMAP_SCAN of /proc/self/pagemap. It came with Linux 6.7. Nothing fails and nothing waits because of it;
the first write to each page takes a microsecond longer. Writes of the kernel itself count too, such as a read from a file.

Not seen are the writes of other processes to shared memory, which is never watched, and of devices to memory that is registered with them.
"""

import ctypes
import errno
import mmap
import os
import platform
from fcntl import ioctl
from weakref import WeakSet, WeakValueDictionary

_LIBC = ctypes.CDLL(None, use_errno=True)
_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
"""The number of the system call; the C library has no function for it."""
_USER_MODE_ONLY = 1
"""Allowed to every user. The kernel's own writes are never held up in the asynchronous mode."""
_API, _REGISTER, _SCAN = 0xC018AA3F, 0xC020AA00, 0xC0606610
"""Numbers of the requests."""
_API_VERSION = 0xAA
_FEATURES = 1 << 0 | 1 << 13 | 1 << 15
"""Write protection, also of pages without memory so far, and the asynchronous mode."""
_FOR_WRITES = 2
_PROTECT, _ONLY_WATCHED = 1, 2
_WRITTEN, _OF_A_FILE, _PRESENT = 1 << 1, 1 << 2, 1 << 3
_MOST_RANGES = 64


class _Api(ctypes.Structure):
    """`struct uffdio_api`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("api", "features", "ioctls")]


class _Register(ctypes.Structure):
    """`struct uffdio_register`."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("start", "len", "mode", "ioctls")]


class _Scan(ctypes.Structure):
    """`struct pm_scan_arg`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    ]


class WatchedMemory:
    """Memory of which the kernel notes whether it was written since."""

    __slots__ = ("__weakref__", "_address", "_end", "_is_touched", "_nbytes", "_start", "_watcher")

    def __init__(self, watcher: "_Watcher", address: int, nbytes: int) -> None:
        """Begin to watch the whole pages in it. Raises `OSError` if the kernel does not do that.

        The kernel forgets what it has noted of these pages, so it is noted here, for others with the same memory.
        """
        self._watcher, self._address, self._nbytes, self._is_touched = watcher, address, nbytes, False
        self._start, self._end = _pages_in(address, nbytes)
        if watcher.protect(self._start, self._end):
            for other in watcher.watched:
                other.note_written(self._start, self._end)
        watcher.watched.add(self)

    def note_written(self, start: int, end: int) -> None:
        """Note that some of these pages were written."""
        self._is_touched |= self._start < end and start < self._end

    def is_untouched(self, address: int, nbytes: int) -> bool:
        """Return whether this is the same memory, and none of its whole pages was written. Then only the bytes at its `edges` may differ."""
        if self._is_touched or (address, nbytes) != (self._address, self._nbytes):
            return False
        try:
            return not self._watcher.has_written(self._start, self._end)
        except OSError:  # other memory was mapped there
            return False

    def edges(self) -> tuple[slice, slice]:
        """Return the bytes before the first whole page, and those after the last one."""
        return slice(0, self._start - self._address), slice(self._end - self._address, self._nbytes)


def watch(address: int, nbytes: int) -> WatchedMemory | None:
    """Begin to watch memory of at least two pages; None if this kernel cannot, or may not in this container, and for shared memory."""
    try:
        watched = WatchedMemory(_present_watcher(), address, nbytes)
    except OSError:
        return None
    return watched if watched.is_untouched(address, nbytes) else None


class _Watcher:
    """The kernel's interface."""

    def __init__(self) -> None:
        """Open it. Raises `OSError` if there is none."""
        self._fd = self._pagemap = -1
        if (number := _USERFAULTFD.get(platform.machine())) is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._fd = _LIBC.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        ioctl(self._fd, _API, _Api(api=_API_VERSION, features=_FEATURES))
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self._found = (ctypes.c_uint64 * (3 * _MOST_RANGES))()
        self.watched: WeakSet[WatchedMemory] = WeakSet()

    def __del__(self) -> None:
        if self._pagemap >= 0:
            os.close(self._pagemap)
        if self._fd >= 0:
            os.close(self._fd)

    def protect(self, start: int, end: int) -> bool:
        """Have the kernel note writes to these pages from now on; return whether it has noted one before, or had not watched all of them."""
        ioctl(self._fd, _REGISTER, _Register(start=start, len=end - start, mode=_FOR_WRITES))
        written = False
        while start < end:  # one call protects a limited number of ranges
            scan = _Scan(flags=_PROTECT | _ONLY_WATCHED, start=start, end=end, vec_len=_MOST_RANGES)
            written |= self._finds(scan, _WRITTEN)
            start = scan.walk_end
        return written

    def has_written(self, start: int, end: int) -> bool:
        """Return whether one of these pages was written, has no memory, or may be written by another process."""
        scan = _Scan(flags=_ONLY_WATCHED, start=start, end=end, vec_len=1, max_pages=1, category_inverted=_PRESENT)
        return self._finds(scan, _WRITTEN | _OF_A_FILE | _PRESENT)

    def _finds(self, scan: _Scan, any_of: int) -> bool:
        """Return whether a scan finds a page with one of these properties."""
        scan.size, scan.vec = ctypes.sizeof(scan), ctypes.addressof(self._found)
        scan.category_anyof_mask = scan.return_mask = any_of
        found: int = ioctl(self._pagemap, _SCAN, scan)
        return found > 0


_watchers: WeakValueDictionary[int, _Watcher] = WeakValueDictionary()
"""By process: a fork's memory is another. One is closed when nothing is watched any more."""


def _present_watcher() -> _Watcher:
    process = os.getpid()
    if (found := _watchers.get(process)) is None:
        found = _watchers[process] = _Watcher()
    return found


def _pages_in(address: int, nbytes: int) -> tuple[int, int]:
    page = mmap.PAGESIZE
    return -(-address // page) * page, (address + nbytes) // page * page
