"""The iterator over a job's steps, which one loop of the script takes."""

import gc
import sys
from collections.abc import Iterator
from inspect import CO_GENERATOR
from itertools import islice
from types import FrameType
from typing import Self, TypeVar

from deadpool_run.errors import ScriptError
from deadpool_run.worker.process.frames import is_integrations

_T = TypeVar("_T")
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
        self._is_passed_on |= _instruction(sys._getframe(1)) != _FOR.begins  # noqa: SLF001 - the documented way to the caller
        return self

    def __next__(self) -> _T:
        """Return the next item."""
        if not self._is_used:
            self._begin(sys._getframe(1))  # noqa: SLF001 - as above
        return next(self._items)

    def _begin(self, frame: FrameType) -> None:
        self._is_used = True
        taker = _taker(frame)
        if taker is not None and not _is_for(taker):
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
    """Return the function that takes the items, also through iterators in Python; None if that is the integration of a framework."""
    outer: FrameType | None = frame
    while outer is not None and (outer.f_code.co_flags & CO_GENERATOR or outer.f_code.co_name == "__next__"):
        outer = outer.f_back
    return None if outer is None or is_integrations(outer) else outer


def _is_for(frame: FrameType) -> bool:
    """Return whether the frame takes an item for a `for` statement."""
    return _instruction(frame) == _FOR.takes and frame.f_code.co_name not in _COMPREHENSIONS


def _instruction(frame: FrameType) -> int:
    """Return the frame's running instruction."""
    return frame.f_code.co_code[frame.f_lasti]


class _Probe:
    """An iterator without items that notes which instructions call it."""

    def __iter__(self) -> Self:
        self.begins = _instruction(sys._getframe(1))  # noqa: SLF001 - as above
        return self

    def __next__(self) -> None:
        self.takes = _instruction(sys._getframe(1))  # noqa: SLF001 - as above
        raise StopIteration


_FOR = _Probe()
"""The instructions of a `for` statement, as this interpreter runs it."""
for _ in _FOR:
    pass
