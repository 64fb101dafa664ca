"""A mapping that is never changed in place, and of which another that differs in one entry costs next to nothing. Pure.

Entries stand on shelves of about a hundred; two mappings share every shelf in which they do not differ. So a change
copies one shelf and the list of shelves, a few microseconds at a hundred thousand entries, and whoever holds the mapping
of before is not touched.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar
from zlib import crc32

from deadpool_run.ids import NodeId

K = TypeVar("K")
V = TypeVar("V")

_SHELF_BITS = 7
_NODE_SHELVES = 128


class _Shelves(Mapping[K, V], Generic[K, V]):
    """What all kinds have in common; they differ in which keys stand together.

    In the order in which shelves were begun, and on a shelf in that in which its keys came: the same changes give the
    same order.
    """

    __slots__ = ("_shelves", "_size")

    def __init__(self, entries: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        found = dict(entries)
        self._shelves: dict[Any, dict[K, V]] = {}
        for key, value in found.items():
            self._shelves.setdefault(self._at(key), {})[key] = value
        self._size = len(found)

    @staticmethod
    def _at(key: K) -> Any:
        """Return which shelf the key stands on."""
        raise NotImplementedError

    def __getitem__(self, key: K) -> V:
        return self._shelves[self._at(key)][key]

    def get(self, key: K, default: Any = None) -> Any:
        """Return the key's value, or the default."""
        try:
            return self._shelves[self._at(key)][key]
        except (KeyError, TypeError):
            return default

    def __contains__(self, key: object) -> bool:
        return self.get(key, self) is not self  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[K]:
        for shelf in self._shelves.values():
            yield from shelf

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    def having(self, key: K, value: V) -> Self:
        """Return these with this one, in the place of the one with its key."""
        shelves, at = self._shelves.copy(), self._at(key)
        shelf = shelves[at].copy() if at in shelves else {}
        before = len(shelf)
        shelf[key] = value
        shelves[at] = shelf
        return self._made(shelves, self._size + len(shelf) - before)

    def having_all(self, changes: Mapping[K, V]) -> Self:
        """Return these with all of those, each shelf copied once."""
        shelves, size = self._shelves.copy(), self._size
        mine: set[Any] = set()
        for key, value in changes.items():
            at = self._at(key)
            if at not in mine:
                mine.add(at)
                shelves[at] = shelves[at].copy() if at in shelves else {}
            shelf = shelves[at]
            size += key not in shelf
            shelf[key] = value
        return self._made(shelves, size)

    def without(self, key: K) -> Self:
        """Return these without this one. Raises KeyError if it is not there."""
        shelves, at = self._shelves.copy(), self._at(key)
        shelf = shelves[at].copy()
        del shelf[key]
        if shelf:
            shelves[at] = shelf
        else:
            del shelves[at]
        return self._made(shelves, self._size - 1)

    def differing(self, other: Self) -> Iterator[K]:
        """Yield the keys under which the two have different things, or only one has any; shared shelves cost nothing."""
        for at in dict.fromkeys((*self._shelves, *other._shelves)):
            mine, theirs = self._shelves.get(at, {}), other._shelves.get(at, {})
            if mine is not theirs:
                for key in dict.fromkeys((*mine, *theirs)):
                    if key not in mine or key not in theirs or mine[key] != theirs[key]:
                        yield key

    @classmethod
    def _made(cls, shelves: dict[Any, dict[K, V]], size: int) -> Self:
        made = cls.__new__(cls)
        made._shelves, made._size = shelves, size  # noqa: SLF001 - one of us
        return made


N = TypeVar("N", bound=int)


class Shelves(_Shelves[N, V]):
    """By number: those that are next to each other stand together."""

    __slots__ = ()

    @staticmethod
    def _at(key: N) -> int:
        return key >> _SHELF_BITS

    def __getitem__(self, key: N) -> V:
        return self._shelves[key >> _SHELF_BITS][key]


class ByNode(_Shelves[NodeId, V]):
    """By node, on a fixed number of shelves: the order says nothing, and is the same wherever the same was done."""

    __slots__ = ()

    @staticmethod
    def _at(key: NodeId) -> int:
        return crc32(key.encode()) % _NODE_SHELVES


class Times(_Shelves[float, int]):
    """Points in time, in seconds, and how many things have each: those of one second stand together."""

    __slots__ = ()

    @staticmethod
    def _at(key: float) -> float:
        return key // 1

    @property
    def first(self) -> float:
        """The earliest; there must be one."""
        return min(self._shelves[min(self._shelves)])

    def one_more(self, at: float) -> "Times":
        """Return these with one more thing at this time."""
        return self.having(at, self.get(at, 0) + 1)

    def one_less(self, at: float) -> "Times":
        """Return these with one thing less at this time."""
        left = self[at] - 1
        return self.having(at, left) if left else self.without(at)


class Draft(dict[K, V]):
    """What of a mapping is about to be changed; the rest is looked up there."""

    def __init__(self, look_up: Callable[[K], V]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, key: K) -> V:
        return self._look_up(key)
