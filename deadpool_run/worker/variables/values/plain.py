"""Numbers, texts and factories as nodes for MessagePack, which refuses some of them."""

import threading
from collections import defaultdict
from typing import Any

FACTORIES: dict[str, type] = {each.__name__: each for each in (list, dict, set, int, float, str, tuple)}
"""The factories with which a `defaultdict` can be rebuilt."""
LOCKS: dict[str, Any] = {type(make()).__name__: type(make()) for make in (threading.Lock, threading.RLock)}
"""The classes of locks. One in a container is replaced by a new one."""
_NUMBERS = frozenset({float, int, bool, type(None)})
_INT64 = 1 << 63


def fits(value: int) -> bool:
    """Return whether a whole number is its own node."""
    return -_INT64 <= value < _INT64


def text_node(value: str) -> Any:
    """Return the node of a text. The name of a file, say, may have surrogates, which MessagePack refuses."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["text", value.encode(errors="surrogatepass")]
    return value


def are_numbers(values: list[Any]) -> bool:
    """Return whether all values are numbers or None that are their own nodes."""
    if not _NUMBERS.issuperset(map(type, values)):
        return False
    whole = [each for each in values if type(each) is int]
    return not whole or (fits(min(whole)) and fits(max(whole)))


def factory_of(value: Any) -> list[str]:
    """Return the name of a `defaultdict`'s factory, if it can be rebuilt with it."""
    factory = value.default_factory if isinstance(value, defaultdict) else None
    return [name for name, kind in FACTORIES.items() if kind is factory]
