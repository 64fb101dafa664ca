"""Content of sets, in the order in which `pop()` and iteration return it.

The order depends on the hashes of the items and on the items that the set once had. So a set that is as it was is left alone. Else
the items are added in their order, which gives it again unless hashes collide.
"""

from typing import Any

_PLAIN = frozenset({int, float, str, bytes})
_EMPTY_BYTES = set.__sizeof__(set())
_SLOT_BYTES = 16
"""Of a set's table: a hash and a reference."""


def fill(target: Any, items: list[Any]) -> None:
    """Replace the items of a set, without running code of its class."""
    if _are_same(list(set.__iter__(target)), items):
        return
    set.clear(target)
    _rewind(target, len(items))
    set.update(target, items)


def _are_same(ones: list[Any], others: list[Any]) -> bool:
    """Return whether these are the same objects, or equal numbers and texts, in the same order."""
    pairs = zip(ones, others, strict=False)
    return len(ones) == len(others) and all(
        one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other) for one, other in pairs
    )


def _rewind(target: Any, count: int) -> None:
    """Have `pop()` of an empty set begin with the first slot of a table for `count` items.

    CPython notes the slot of the last `pop()`, and `clear()` does not reset it. After a `pop()` from the last slot of a larger table,
    whose number of slots is a power of two, the next one is the first slot.
    """
    numbers = range(4 * count + 8)
    set.update(target, numbers)
    last = (set.__sizeof__(target) - _EMPTY_BYTES) // _SLOT_BYTES - 1
    set.add(target, last)  # the hash of a small number is the number
    for number in numbers:
        set.discard(target, number)
    set.pop(target)
    set.clear(target)
