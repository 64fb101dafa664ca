"""A memory file into which a copy is received, with its mapping."""

import mmap
import os

from deadpool_run.vault.segments import whole_pages


class Memory:
    """A memory file and its mapping, which is kept while copies rotate to avoid page faults."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapped: mmap.mmap | None = None

    def view(self, nbytes: int) -> memoryview:
        """Return the first `nbytes` bytes, which the caller releases. Raises OSError without memory for them."""
        if self._mapped is None or len(self._mapped) < nbytes:
            self.unmap()
            size = whole_pages(nbytes)
            if size > os.fstat(self.fd).st_size:
                os.ftruncate(self.fd, size)
            self._mapped = mmap.mmap(self.fd, size)
        return memoryview(self._mapped)[:nbytes]

    @property
    def taken(self) -> int:
        """How much memory this takes, in bytes."""
        return os.fstat(self.fd).st_size

    def growth(self, nbytes: int) -> int:
        """Return how much more memory this takes to hold this many bytes."""
        return max(0, whole_pages(nbytes) - self.taken)

    def unmap(self) -> None:
        """Unmap; the content stays."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def give(self) -> int:
        """Return the descriptor, which becomes the caller's."""
        self.unmap()
        return self.fd

    def close(self) -> None:
        """Unmap and close."""
        self.unmap()
        os.close(self.fd)
