"""Names what blocked the agent's event loop, so that a lost leadership has a reason in the log, and acts in its place.

A thread looks at the stack of the loop's thread only while the loop is late. A loop that is in time costs a few wake-ups a second.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_LOOKS = 4
"""In each `limit_s`, for the loop and for the thread."""
_QUIET_S = 60.0
"""After a line. A longer block is reported at once."""
_FRAMES = 3
"""Innermost calls that a line names."""
_HERE = Path(__file__).parents[1]


class LoopWatch:
    """Watches the running loop, from its thread, until `close`. `print_line` gets a line if it was blocked for `limit_s` or longer.

    Meanwhile the watching thread calls `while_late` again and again.
    """

    def __init__(
        self, limit_s: float, print_line: Callable[[str], None], while_late: Callable[[], None] = lambda: None
    ) -> None:
        self._limit_s = limit_s
        self._print_line, self._while_late = print_line, while_late
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._beat = time.monotonic()
        self._found = ""
        self._said = (float("-inf"), 0.0)
        self._over = threading.Event()
        self._timer = self._loop.call_later(limit_s / _LOOKS, self._be_alive)
        self._thread = threading.Thread(target=self._watch, name="deadpool-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._timer.cancel()
        self._over.set()
        self._thread.join()

    def _be_alive(self) -> None:
        now, period_s = time.monotonic(), self._limit_s / _LOOKS
        blocked_s, found = now - self._beat - period_s, self._found
        self._beat, self._found = now, ""
        self._timer = self._loop.call_later(period_s, self._be_alive)
        if blocked_s < self._limit_s:
            return
        at, longest_s = self._said
        if now - at > _QUIET_S or blocked_s > longest_s:
            self._said = now, blocked_s
            where = (
                f"in {found}" if found else "and ran no code of its own: the machine was busy, or the process stopped"
            )
            self._print_line(f"this agent answered no message for {blocked_s:.1f} s {where}")

    def _watch(self) -> None:
        period_s = self._limit_s / _LOOKS
        while not self._over.wait(period_s):
            if time.monotonic() - self._beat > period_s + self._limit_s:
                if not self._found:
                    self._found = _describe(sys._current_frames().get(self._watched))  # noqa: SLF001 - its documented use
                self._while_late()


def _describe(frame: FrameType | None) -> str:
    """Return the innermost calls of the package, the last one first; empty if the loop waits for events."""
    calls: list[str] = []
    while frame is not None and len(calls) < _FRAMES:
        code = frame.f_code
        path = Path(code.co_filename)
        if not calls and path.name == "selectors.py":
            return ""
        if path.is_relative_to(_HERE):
            calls.append(f"{path.relative_to(_HERE)}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return ", called from ".join(calls)
