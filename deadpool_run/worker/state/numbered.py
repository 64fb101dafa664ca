"""Objects that a snapshot cannot hold, and names by a number: the process that has them can put them back."""

import secrets
import weakref
from collections import deque
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NumberedObjects(Generic[T]):
    """The newest objects of this process, by identity."""

    def __init__(self, most: int) -> None:
        self._known: deque[tuple[int, T]] = deque(maxlen=most)

    def number(self, obj: T) -> int:
        """Return the object's number, above 0. Equal numbers are the same object of the same process."""
        for number, known in self._known:
            if known is obj:
                return number
        self._known.append((secrets.randbits(62) | 1, obj))
        return self._known[-1][0]

    def get(self, number: int) -> T | None:
        """Return the object; None if another process has it, or too many came later."""
        return dict(self._known).get(number)


class WeaklyNumbered:
    """The newest objects of this process, by identity, without keeping them alive."""

    def __init__(self, most: int) -> None:
        self._known: NumberedObjects[weakref.ref[Any]] = NumberedObjects(most)

    def number(self, obj: Any) -> int:
        """Return the object's number, above 0. Raises `TypeError` if its class allows no weak references."""
        return self._known.number(weakref.ref(obj))  # an object's plain references are one and the same

    def get(self, number: int) -> Any:
        """Return the object; None if it is gone, if another process has it, or if too many came later."""
        found = self._known.get(number)
        return None if found is None else found()
