"""Objects that a snapshot cannot hold, and names by a number: the process that has them can put them back."""

import secrets
import weakref
from collections import deque
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MOST_VALUES = 4096


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
    """The objects of this process that were used last, by identity, without keeping them alive."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: dict[int, int] = {}
        self._objects: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def number(self, obj: Any) -> int:
        """Return the object's number, above 0. Raises `TypeError` if its class allows no weak references."""
        number = self._numbers.get(id(obj), 0)
        if self.get(number) is obj:
            self._objects[number] = self._objects.pop(number)
            return number
        number = secrets.randbits(62) | 1
        self._objects[number] = id(obj), weakref.ref(obj)
        self._numbers[id(obj)] = number
        while len(self._objects) > self._most:
            oldest = next(iter(self._objects))
            key, _ = self._objects.pop(oldest)
            if self._numbers.get(key) == oldest:
                del self._numbers[key]
        return number

    def get(self, number: int) -> Any:
        """Return the object; None if it is gone, if another process has it, or if too many were used later."""
        _, found = self._objects.get(number, (0, None))
        return None if found is None else found()

    def has(self, obj: Any) -> bool:
        """Return whether the object has a number."""
        return self.get(self._numbers.get(id(obj), 0)) is obj


class MadeLater:
    """The objects that a process has made since its loop began, and of which a snapshot has the numbers."""

    def __init__(self, most: int) -> None:
        """`most` is the limit on functions, modules and the like."""
        self.weakly = WeaklyNumbered(most)
        self.values = WeaklyNumbered(_MOST_VALUES)
        """Objects of libraries that are written with their attributes."""
        self.opaque = WeaklyNumbered(_MOST_VALUES)
        """Objects of libraries that cannot be written, so that this is tried once only."""
