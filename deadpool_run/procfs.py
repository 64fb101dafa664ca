"""Facts about processes that the kernel tells in proc(5)."""

from contextlib import suppress
from pathlib import Path


def children_of(process: int | str) -> set[int]:
    """Return the children of a process, by its id or "self". psutil would read every process, which a hidden /proc refuses."""
    found: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for task in Path(f"/proc/{process}/task").iterdir():
            # The thread has ended, or the kernel lacks CONFIG_PROC_CHILDREN.
            with suppress(FileNotFoundError):
                found.update(map(int, (task / "children").read_text().split()))
    return found
