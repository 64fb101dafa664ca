"""The iterator over a job's steps, which one loop of the script takes."""

import gc
import sys
from collections.abc import Iterator
from inspect import CO_GENERATOR
from itertools import islice
from opcode import opmap
from types import FrameType
from typing import Self, TypeVar

from deadpool_run.errors import ScriptError
from deadpool_run.ids import PACKAGE

_T = TypeVar("_T")
_BEGINS_LOOP, _TAKES_NEXT = opmap["GET_ITER"], opmap["FOR_ITER"]
"""The instructions of a `for` statement."""
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Names of their code before Python 3.12."""


class OnlyLoop(Iterator[_T]):
    """An iterator for one `for` statement. Any other use raises `ScriptError`.

    A replacement for a lost rank comes to the first steps by itself, and to the others by a snapshot, which knows of no loop around the
    steps: the replacement would go on in the first round of that loop, as in the first epoch.
    """

    def __init__(self, name: str, items: Iterator[_T]) -> None:
        """`name` is the method that returned the iterator."""
        self._name = name
        self._items = items
        self._is_used = self._is_passed_on = False

    def __iter__(self) -> Self:
        """Begin the loop. Progress bars and other iterators around the steps do so before the first step."""
        if self._is_used:
            raise ScriptError(
                f"a second loop takes steps from the same job.{self._name}(): after a loss, a replacement would go on in the first one.\n"
                f"Take all steps in one loop: for step in job.{self._name}(...), and derive the epoch from step.index."
            )
        self._is_passed_on |= not _runs(sys._getframe(1), _BEGINS_LOOP)  # noqa: SLF001 - the documented way to the caller
        return self

    def __next__(self) -> _T:
        """Return the next item."""
        if not self._is_used:
            self._begin(sys._getframe(1))  # noqa: SLF001 - as above
        return next(self._items)

    def _begin(self, frame: FrameType) -> None:
        self._is_used = True
        taker = _taker(frame)
        if taker is not None and not _runs(taker, _TAKES_NEXT):
            raise ScriptError(
                f"the steps of job.{self._name}() are taken by a call or a comprehension: what that collects, or a loop around it, would not be "
                f"restored after a loss.\nTake all steps in one loop: for step in job.{self._name}(...)."
            )
        if self._is_passed_on and any(type(each) is islice for each in gc.get_referrers(self)):
            raise ScriptError(
                f"islice() counts the steps of job.{self._name}(), also those that are repeated, and so would end the loop too early.\n"
                f"Pass the number of steps: job.{self._name}({'steps=' if self._name == 'batches' else ''}N)."
            )


def _taker(frame: FrameType) -> FrameType | None:
    """Return the function that takes the items, also through generators; None if that is the integration of a framework."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_flags & CO_GENERATOR:
        outer = outer.f_back
    module = "" if outer is None else str(outer.f_globals.get("__name__", ""))
    return None if module.startswith(f"{PACKAGE}.integrations.") else outer


def _runs(frame: FrameType, instruction: int) -> bool:
    """Return whether this is the frame's running instruction, in a function or a module: a comprehension is neither."""
    return frame.f_code.co_code[frame.f_lasti] == instruction and frame.f_code.co_name not in _COMPREHENSIONS
