"""Objects that snapshots leave alone: whether another process of the rank has one that is further on, and whether a step changes one.

A progress bar, a writer of logs, a container of a library: most are of no concern to the weights, so their use is not refused. After
a restore the user learns which of them do not have the state of the lost rank. If a step gives other results when it is run again,
the user learns which of them it changes.
"""

import functools
import gc
import hashlib
import io
import logging
import mmap
import queue
import socket
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from types import GeneratorType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from deadpool_run.ids import PACKAGE, is_of_package
from deadpool_run.worker.codec import table_of
from deadpool_run.worker.compat.writes import all_writes_of
from deadpool_run.worker.state import generators
from deadpool_run.worker.variables.values.kinds.functions import CODE
from deadpool_run.worker.variables.values.kinds.iterators import is_iterator, progress_of
from deadpool_run.worker.variables.values.objects import OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.tensors import is_data, is_numeric_array, is_object_array, sample_of_array
from deadpool_run.worker.variables.values.writer import ValueWriter

_MOST_PARTS = 256
_MOST_PARTS_INSIDE = 4096
_MOST_PARTS_IN_ALL = 1 << 16
_MOST_LETTERS = 1024
_DEEPEST = 8
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_CONTAINERS: tuple[Any, ...] = (list, dict, set)
_CACHED = type(functools.cache(len))
_MOST_BYTES = 1 << 16
_HASHES = frozenset({"_hashlib", "_blake2", "_md5", "_sha1", "_sha2", "_sha256", "_sha512", "_sha3"})
_LINK = "_lru_list_elem"
_OF_CACHES = frozenset({_LINK, "object"})
"""Classes of the parts of a cache that are neither arguments nor results."""
_OTHER = (*CODE, ModuleType, nn.Module, Optimizer)
_OUTPUT = (io.IOBase, logging.Logger, queue.Queue, socket.socket, subprocess.Popen, threading.Thread)
_WELL_KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", PACKAGE}) - {"queue"}
"""Packages whose objects are looked after elsewhere, or refused when a step depends on them: iterators, loaders, locks."""

_MADE_IN_LOOP = "made in the loop"


class Unwritten(NamedTuple):
    """An object that is not kept whole."""

    digest: str
    of_concern: bool
    """Whether it is neither an iterator, of which the user learns otherwise, nor has anything for output, as a progress bar has."""


def progress_of_made(value: Any, own: Collection[str] = ()) -> str:
    """Return the progress of a value that the loop has made: the one of an object of a library, another process may have too.

    Empty for a file that is closed. `own` are the names of the script's modules.
    """
    kind = type(value)  # a proxy would run code if asked for more
    if issubclass(kind, (*_CONTAINERS, tuple, deque)) or kind.__module__ in own:
        return _MADE_IN_LOOP
    if issubclass(kind, io.IOBase) and value.closed:
        return ""
    return f"{_MADE_IN_LOOP}: {kind.__module__}.{kind.__qualname__}"


def progress_here(values: Iterable[tuple[str, Any]], names: Collection[str]) -> dict[str, str]:
    """Return the progress of those of these objects of libraries that have one of the names, as if the loop had made them."""
    found = {name: progress_of_made(value) for name, value in values if name in names} if names else {}
    return {name: progress for name, progress in found.items() if progress != _MADE_IN_LOOP}


def fingerprint_of(value: Any) -> str:
    """Return a digest of the numbers and strings directly in an object, and of the sizes of its containers; empty for code and models.

    Of a function with `functools.lru_cache`, it shows how many results were computed. Of most objects of Python's own libraries that
    are written in C, nothing can be seen: empty, except for `_SIGNS`.
    """
    value = _function_of(value)
    kind = type(value)  # a proxy would run code if asked for more
    if kind is _CACHED:
        return str(value.cache_info().misses)
    if issubclass(kind, _OTHER) or kind.__module__.partition(".")[0] in _WELL_KNOWN:
        return next((_sign(sign, value) for is_of, sign in _SIGNS if is_of(kind)), "")
    found = {name: _shape(each) for name, each in list(table_of(value).items())[:_MOST_PARTS] if type(name) is str}
    if issubclass(kind, dict):
        found |= {f"[{key!r}]": _shape(each) for key, each in list(dict.items(value))[:_MOST_PARTS] if type(key) is str}
    found["len"] = _shape(value)
    return _digest(sorted(found.items()))


def _sign(sign: Callable[[Any], Any], value: Any) -> str:
    try:
        return str(sign(value))
    except Exception:  # noqa: BLE001 - it is closed, or of another thread
        return ""


def _position(file: Any) -> Any:
    """Return the position of a file that is read and written. One that is only written is a log; one that is only read is an iterator."""
    return file.tell() if file.readable() and file.writable() else ""


def _content(memory: Any) -> Any:
    return zlib.crc32(memory) if memoryview(memory).nbytes <= _MOST_BYTES else ""


_SIGNS: tuple[tuple[Callable[[type], bool], Callable[[Any], Any]], ...] = (
    (lambda kind: kind.__module__ in _HASHES, lambda value: value.hexdigest()),
    (lambda kind: kind.__module__ == "sqlite3", lambda value: value.total_changes),
    (lambda kind: issubclass(kind, io.IOBase), _position),
    (lambda kind: kind in (memoryview, mmap.mmap), _content),
)
"""Classes, and what changes with the state of their objects."""


def forget_data(value: Any) -> None:
    """Have a function with `functools.lru_cache`, or a method, compute again if its results so far are numbers, strings, tensors and arrays.

    Its arguments may be any objects, such as that of a method.
    """
    function = _function_of(value)
    if type(function) is not _CACHED or not function.cache_info().currsize:
        return
    known = {id(vars(function)), id(function.__wrapped__)}
    parts = [each for each in gc.get_referents(function) if id(each) not in known]
    tables = [each for each in parts if type(each) is dict]
    table = next((each for each in tables if each and all(map(_is_link, each.values()))), tables[-1])
    known |= {id(table), *map(id, table)}
    if all(_is_data(each, 0) for each in (*parts, *table.values()) if id(each) not in known):
        function.cache_clear()


def _is_link(value: Any) -> bool:
    """Return whether a value is a part of a cache of limited length, which has an argument and a result."""
    return type(value).__name__ == _LINK


def _function_of(value: Any) -> Any:
    """Return the function in a static method or a class method; any other value as it is."""
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def _is_data(value: Any, depth: int) -> bool:
    """Return whether a part of a cache is data, or a table of its parts."""
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, type) or is_data(value) or kind.__name__ in _OF_CACHES:
        return True
    if not issubclass(kind, (tuple, list, dict)) or depth > _DEEPEST:
        return False
    parts = (*dict.keys(value), *dict.values(value)) if issubclass(kind, dict) else value
    return all(_is_data(each, depth + 1) for each in parts)


def _shape(value: Any) -> Any:
    """Return a number or a string itself, the size of a container, and None for anything else."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    container = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    return None if container is None else container.__len__(value)


def digests_of_unwritten(
    values: Iterable[tuple[str, Any]], writer: Callable[[], ValueWriter], is_kept: Callable[[object], bool]
) -> dict[str, Unwritten]:
    """Return digests of the objects and iterators that a writer does not keep whole, by name and class, each object once. Slow.

    Without what is inside them and `is_kept` otherwise, such as a protected model.
    """
    found: dict[str, Unwritten] = {}
    seen, parts = set(), 0
    for name, value in values:
        if (
            parts < _MOST_PARTS_IN_ALL
            and id(value) not in seen
            and not is_kept(value)
            and _is_unwritten(value, writer())
        ):
            seen.add(id(value))
            search = _Inside(is_kept)
            search.look(value, 0)
            parts += len(search.found)
            of_concern = not (search.has_output or is_iterator(value))
            found[f"{name} ({type(value).__qualname__})"] = Unwritten(_digest(search.found), of_concern)
    return found


def _is_unwritten(value: Any, writer: ValueWriter) -> bool:
    if _is_passed_over(type(value)):
        return False
    try:
        writer.write(value)
    except UnkeptDataError:
        return is_iterator(value)
    except OpaqueError:
        return True
    return writer.holes > 0


def _is_passed_over(kind: type) -> bool:
    return issubclass(kind, (*CODE, ModuleType)) or is_of_package(kind.__module__)


def _digest(found: list[Any]) -> str:
    return hashlib.blake2b(repr(found).encode(errors="replace"), digest_size=8).hexdigest()


class _Inside:
    """A search through an object, its attributes and its containers."""

    def __init__(self, is_kept: Callable[[object], bool]) -> None:
        self._is_kept = is_kept
        self.found: list[Any] = []
        self.has_output = False
        self._seen: dict[int, Any] = {}
        """Objects that were looked at, by identity. They are kept alive, so that no other object gets their identity."""

    def look(self, value: Any, depth: int) -> None:
        """Add what is in a value."""
        kind = type(value)
        if _is_passed_over(kind) or self._is_kept(value):
            return
        if kind is str or kind is bytes:
            self.found += [len(value), value[:_MOST_LETTERS]]
        elif kind in _PLAIN:
            self.found.append(value)
        elif issubclass(kind, Tensor):
            self.found.append(all_writes_of(value))
        elif is_numeric_array(value):
            self.found.append(sample_of_array(value))
        elif generators.kind_of(value):
            self.found.append(repr(generators.state_of(value)))
        elif id(value) not in self._seen and depth <= _DEEPEST:
            self._seen[id(value)] = value
            self.has_output |= issubclass(kind, _OUTPUT)
            if is_iterator(value):
                self.found.append(repr(progress_of(value)))
            self._look_inside(kind, value, depth)

    def _look_inside(self, kind: type, value: Any, depth: int) -> None:
        parts: list[tuple[Any, Any]] = list(table_of(value).items())
        container = next((each for each in (dict, list, tuple, deque) if issubclass(kind, each)), None)
        if container is not None:
            parts += dict.items(value) if container is dict else enumerate(container.__iter__(value))
        elif is_object_array(value):
            parts += enumerate(value.flat)
        elif kind is GeneratorType and value.gi_frame is not None:
            parts += value.gi_frame.f_locals.items()
        elif not parts and kind.__module__.partition(".")[0] not in _WELL_KNOWN:  # in C, or with slots
            parts += enumerate(each for each in gc.get_referents(value) if not isinstance(each, type))
        for name, each in parts:
            if len(self.found) >= _MOST_PARTS_INSIDE:
                return
            self.found.append(name if type(name) in _PLAIN else None)
            self.look(each, depth + 1)
