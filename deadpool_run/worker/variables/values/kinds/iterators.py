"""Iterators in variables: the parts that rebuild some of them at their position, and the progress of the others."""

import io
import itertools
import sys
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

from deadpool_run.ids import is_of_package
from deadpool_run.worker.compat.loaders import items_yielded
from deadpool_run.worker.process.frames import is_own_generator, local_variables
from deadpool_run.worker.variables.values.kinds.library_values import is_immutable
from deadpool_run.worker.variables.values.lost import LostValue

WHY_LOST = "it is an iterator, and its position cannot be restored"

_MADE_BY: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        iter,
        reversed,
        enumerate,
        zip,
        itertools.chain,
        itertools.combinations,
        itertools.count,
        itertools.cycle,
        itertools.islice,
        itertools.permutations,
        itertools.product,
        itertools.repeat,
        itertools.zip_longest,
    )
}
_OF_CALLS = type(iter(int, 1))
_DEEPEST = 8
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator, such as a generator or an input file.

    The library's loop over the steps does not count, nor does a generator that this loop runs in.
    """
    if not isinstance(value, Iterator) or _is_step_loop(value):
        return False
    return not isinstance(value, io.IOBase) or _is_read(value)


def parts_of(value: Iterator[Any]) -> list[Any] | None:
    """Return the parts that rebuild an iterator: a name, arguments, and its state if it has one; None if nothing can rebuild it."""
    if isinstance(value, GeneratorType) and value.gi_frame is None:  # used up: an empty iterator gives the same
        return [iter.__name__, [()]]
    parts = _reduced(value)
    if parts is None:
        return None
    made_by, arguments, *state = parts
    name = getattr(made_by, "__name__", "")
    return [name, list(arguments), *state] if _MADE_BY.get(name) is made_by else None


def of_parts(name: str, arguments: list[Any], *state: Any) -> Any:
    """Return an iterator, rebuilt from the result of `parts_of`."""
    made = _MADE_BY[name](*arguments)
    if state and state[0] is not None:
        made.__setstate__(state[0])
    return made


def progress_of(value: Iterator[Any]) -> Any:
    """Return a value that changes when the iterator advances; None if its class does not show it."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return "ended"
        inner = _mark(value.gi_yieldfrom)
        return frame.f_lasti, inner, {name: _mark(each) for name, each in local_variables(frame).items()}
    if isinstance(value, io.IOBase):
        return _position(value)
    yielded = items_yielded(value)
    if yielded is not None:
        return yielded
    parts = _reduced(value)
    if parts is None or type(value) is _OF_CALLS:  # what it calls has the position
        return None
    return tuple(map(_mark, parts[1:]))


def _mark(value: Any, depth: int = 0) -> Any:
    if isinstance(value, _PLAIN) or is_immutable(value):
        return value
    if depth < _DEEPEST:
        if isinstance(value, tuple | list):
            return [_mark(each, depth + 1) for each in value[:64]]
        if isinstance(value, Iterator) and type(value) is not LostValue:
            return id(value), progress_of(value)
    return id(value)


def _reduced(value: Any) -> tuple[Any, ...] | None:
    """Return the parts from which pickle makes a built-in iterator; None for others, and for itertools from Python 3.14 on."""
    if type(value).__module__ not in ("builtins", "itertools") or isinstance(value, GeneratorType):
        return None
    try:
        found = value.__reduce__()
    except (TypeError, DeprecationWarning):
        return None
    return found if isinstance(found, tuple) else None


def _is_step_loop(value: Any, depth: int = 0) -> bool:
    """Return whether a value is the library's loop over the steps, or an iterator over it."""
    if isinstance(value, GeneratorType):
        return is_own_generator(value) or _runs_here(value)
    if is_of_package(type(value).__module__):
        return True
    parts = _reduced(value) if depth < _DEEPEST and isinstance(value, Iterator) else None
    return parts is not None and any(_is_step_loop(each, depth + 1) for each in parts[1])


def _runs_here(generator: "GeneratorType[Any, Any, Any]") -> bool:
    """Return whether a generator is running in this thread."""
    frame = sys._getframe() if generator.gi_running else None  # noqa: SLF001 - documented
    while frame is not None and frame is not generator.gi_frame:
        frame = frame.f_back
    return frame is not None


def _is_read(file: io.IOBase) -> bool:
    try:
        return file.readable() and not file.writable()
    except (OSError, ValueError):  # closed
        return False


def _position(file: io.IOBase) -> int | None:
    try:
        return file.tell()
    except (OSError, ValueError):  # no position while it is iterated, or closed
        return None
