"""Counts refused connections, and reports them."""

import asyncio

from deadpool_run.agent.console import tell
from deadpool_run.text import printable

_REPORT_EVERY_S = 60.0


class Refusals:
    """Counts refused connections, and prints one line for all of an interval. The first is reported at once."""

    def __init__(self, which: str = "") -> None:
        """`which` says in the line what kind of connections they are."""
        self._which = f" {which}" if which else ""
        self.total = 0
        self._new = 0
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, source: str, reason: str, count: int = 1) -> None:
        """Count `count` refused connections."""
        if self._closed:
            return
        self.total += count
        self._new += count
        self._last = f"from {source}: {printable(reason)}"
        if self._timer is None:
            self._report()

    def close(self) -> None:
        """Report those that are left."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._report()

    def _report(self) -> None:
        self._timer = None
        if self._new == 1:
            tell(f"refused a connection{self._which} {self._last}")
        elif self._new:
            tell(f"refused {self._new} connections{self._which}, the last {self._last}")
        if self._new and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(_REPORT_EVERY_S, self._report)
        self._new = 0
