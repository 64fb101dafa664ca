"""The iterator over a job's steps, which one loop of the script takes."""

import gc
import sys
from collections.abc import Iterator
from itertools import islice
from opcode import opmap
from types import FrameType
from typing import Self, TypeVar

from deadpool_run.errors import ScriptError

_T = TypeVar("_T")
_BEGINS_LOOP = opmap["GET_ITER"]


class OnlyLoop(Iterator[_T]):
    """An iterator for one `for` statement. Any other use raises `ScriptError`.

    A replacement for a lost rank comes to the first steps by itself, and to the others by a snapshot, which knows of no loop around the
    steps: the replacement would go on in the first round of that loop, as in the first epoch.
    """

    def __init__(self, name: str, items: Iterator[_T]) -> None:
        """`name` is the method that returned the iterator."""
        self._name = name
        self._items = items
        self._loops = 0
        self._is_used = self._is_passed_on = False

    def __iter__(self) -> Self:
        """Begin the loop. Progress bars and other iterators around the steps do so before the first step."""
        if self._is_used:
            raise ScriptError(
                f"a second loop takes steps from the same job.{self._name}(): after a loss, a replacement would go on in the first one.\n"
                f"Take all steps in one loop: for step in job.{self._name}(...), and derive the epoch from step.index."
            )
        self._loops += 1
        self._is_passed_on |= not _begins_loop(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        return self

    def __next__(self) -> _T:
        """Return the next item."""
        if not self._is_used:
            self._begin()
        return next(self._items)

    def _begin(self) -> None:
        self._is_used = True
        if not self._loops:
            raise ScriptError(
                f"next() was called on job.{self._name}(): a loop around it would not be continued after a loss.\n"
                f"Take all steps in one loop: for step in job.{self._name}(...)."
            )
        if self._is_passed_on and any(type(each) is islice for each in gc.get_referrers(self)):
            raise ScriptError(
                f"islice() counts the steps of job.{self._name}(), also those that are repeated, and so would end the loop too early.\n"
                f"Pass the number of steps: job.{self._name}({'steps=' if self._name == 'batches' else ''}N)."
            )


def _begins_loop(frame: FrameType) -> bool:
    """Return whether the frame's running instruction is that of a `for`, and no call."""
    return frame.f_code.co_code[frame.f_lasti] == _BEGINS_LOOP
