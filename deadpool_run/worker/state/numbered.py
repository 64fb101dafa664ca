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


class RecentObjects:
    """The objects of the last snapshots, by identity. They are kept alive for as long."""

    def __init__(self, snapshots: int) -> None:
        self._snapshots: deque[dict[int, tuple[int, Any]]] = deque([{}], maxlen=snapshots)

    def next(self) -> None:
        """Begin another snapshot."""
        self._snapshots.append({})

    def number(self, obj: Any) -> int:
        """Return the number of an object of the present snapshot, above 0."""
        known = next((each[id(obj)] for each in self._snapshots if id(obj) in each), None)
        number, _ = self._snapshots[-1][id(obj)] = known or (secrets.randbits(62) | 1, obj)
        return number

    def get(self, number: int) -> Any:
        """Return the object; None if it is of an older snapshot, or if another process has it."""
        found = (obj for each in self._snapshots for known, obj in each.values() if known == number)
        return next(found, None)


class WeaklyNumbered:
    """The newest objects of this process, by identity, without keeping them alive."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: dict[int, int] = {}
        self._objects: dict[int, weakref.ref[Any]] = {}

    def number(self, obj: Any) -> int:
        """Return the object's number, above 0. Raises `TypeError` if its class allows no weak references."""
        number = self._numbers.get(id(obj), 0)
        if self.get(number) is obj:
            return number
        number = self._numbers[id(obj)] = secrets.randbits(62) | 1
        self._objects[number] = weakref.ref(obj)
        if len(self._objects) > self._most:
            del self._objects[next(iter(self._objects))]
            self._numbers = {key: known for key, known in self._numbers.items() if known in self._objects}
        return number

    def get(self, number: int) -> Any:
        """Return the object; None if it is gone, if another process has it, or if too many came later."""
        found = self._objects.get(number)
        return None if found is None else found()

    def has(self, obj: Any) -> bool:
        """Return whether the object has a number."""
        return self.get(self._numbers.get(id(obj), 0)) is obj


class MadeLater:
    """The objects that a process has made since its loop began, and of which a snapshot has the numbers."""

    def __init__(self, most: int, snapshots: int) -> None:
        """`most` is the limit on objects that are not kept alive; others are, for so many snapshots."""
        self.weakly = WeaklyNumbered(most)
        self.opaque = WeaklyNumbered(most)
        """Objects of libraries that cannot be written, so that this is tried once only."""
        self.parts = RecentObjects(snapshots)
