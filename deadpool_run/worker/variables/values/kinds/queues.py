"""Queues of the standard library as values of variables, as long as no other thread can use them."""

import queue
from typing import Any

from deadpool_run.worker.process import script_threads

_KINDS: dict[str, Any] = {each.__name__: each for each in (queue.Queue, queue.LifoQueue, queue.PriorityQueue)}


def is_kept(value: Any) -> bool:
    """Return whether a value is a queue that only the thread with the step loop uses. What a thread fills is not the step's."""
    return type(value) in _KINDS.values() and not script_threads.are_running()


def parts_of(value: Any) -> tuple[str, int, int, list[Any]]:
    """Return class, limit, count of unfinished tasks and content of a queue."""
    return type(value).__name__, value.maxsize, value.unfinished_tasks, list(value.queue)


def filled(into: Any, kind: str, limit: int, unfinished: int, content: list[Any]) -> Any:
    """Return `into` if it is such a queue, else a new one, with the result of `parts_of`."""
    found = into if type(into) is _KINDS[kind] and into.maxsize == limit else _KINDS[kind](limit)
    with found.mutex:
        found.queue.clear()
        found.queue.extend(content)
        found.unfinished_tasks = unfinished
    return found
