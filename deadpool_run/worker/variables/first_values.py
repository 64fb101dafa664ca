"""First values of variables that have to be the same in a replacement: tensors, arrays, small whole numbers, and lists of these.

A snapshot has only what changed since the loop began. Set-up of a replacement has to give the rest, so it must not read what
training has written, such as a checkpoint of the script's own. Floats and strings may differ: they are times, paths, host names.
So may bools: a script may note `job.rehearsing` in set-up.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from deadpool_run.worker.state import generators
from deadpool_run.worker.state.digest import digest, sample
from deadpool_run.worker.variables.baseline import First
from deadpool_run.worker.variables.values.lost import LostValue
from deadpool_run.worker.variables.values.tensors import TensorCopy

_PORTS = range(32768, 61000)
"""From these the kernel chooses ports."""
COUNT = 1_000_000
"""Larger numbers may be times, or bytes of memory."""
OTHER_SETUP = (
    "Set-up gave another result than the first time: it read a file that training has written, such as a checkpoint of the script's "
    "own, or drew from a generator without a seed.\nUse --durable in place of own checkpoints, or let one rank read the file and send "
    "the values to all others in set-up: a replacement gets what its rank received the first time."
)
_OTHER_VALUE = "it is another one than in the rank's first process"
_MANY = 8
"""Shorter lists of whole numbers are not compared: they may be devices, ports or processes."""
_LARGEST_INDEX = 1 << 40
_WHOLE_BYTES = 1 << 20
"""Of a larger tensor, a sample is compared."""
_DIGEST_BYTES = 8
_IN_PART = re.compile(r"(.*), (closure|defaults|buffers|attributes)\.(.*)")
"""The owner of a scope that is a part of it, the part, and a variable there."""
_PROTECTED = "protected "
"""Scopes with such names have the attributes of protected objects, whose numbers their states have."""

Name = tuple[str, str]
"""The names of a scope and a variable."""


class FirstValues:
    """The variables whose first values differ here from those in the rank's first process. Empty in that process."""

    def __init__(self) -> None:
        self._tensors: set[Name] = set()
        self._numbers: dict[Name, tuple[int, int]] = {}
        """There, and here."""
        self._is_same_machine = False
        self.other_numbers: list[str] = []
        """Of the last restore, for a warning: variables that are other numbers here."""

    def compare(self, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Note the variables that differ between the facts of the rank's first process and those of this one."""
        self._is_same_machine = there.get("machine") == here["machine"]
        places, theirs = (there.get("place"), here["place"]), there.get("values", {})
        for scope, values in here["values"].items():
            for name, now in values.items():
                then = theirs.get(scope, {}).get(name)
                if then == now or type(then) is not type(now):
                    continue
                if isinstance(now, str):
                    self._tensors.add((scope, name))
                elif (then, now) != places and not _are_of_processes(then, now, there, here):
                    self._numbers[scope, name] = then, now

    def restored(self, changed: Mapping[str, Any]) -> None:
        """Note which numbers differ after a restore. What training has `changed` comes from the snapshot."""
        self.other_numbers = [self._words(name) for name in self._numbers if name[1] not in changed.get(name[0], ())]

    def stand_ins(self, scope: str, names: Iterable[str], refuse: Callable[[str], NoReturn]) -> dict[str, LostValue]:
        """Return stand-ins for what differs, among these variables of a scope. A step that reads one is refused.

        On another machine a number may be one of that machine.
        """
        if not (self._numbers or self._tensors):
            return {}
        return {
            name: LostValue(
                shown_variable(scope, name), _OTHER_VALUE, partial(_refuse, refuse, self._words((scope, name)))
            )
            for name in names
            if (scope, name) in self._tensors or (self._is_same_machine and (scope, name) in self._numbers)
        }

    def _words(self, name: Name) -> str:
        if name in self._tensors:
            return f"{shown_variable(*name)} has other numbers here than in the rank's first process"
        then, now = self._numbers[name]
        return f"{shown_variable(*name)} is {now} here and was {then} in the rank's first process"


def _are_of_processes(then: int, now: int, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether the numbers are open file descriptors of both processes, or ports that the kernel chose."""
    are_open = then in there.get("descriptors", ()) and now in here["descriptors"]
    return are_open or (then in _PORTS and now in _PORTS)


def _refuse(refuse: Callable[[str], NoReturn], words: str, _: str) -> NoReturn:
    refuse(f"{words}, and a step has read it. {OTHER_SETUP}")


def shown_variable(scope: str, name: str) -> str:
    """Return the name of a variable for messages."""
    full = f"{scope}.{name}".removeprefix("__main__.")
    found = _IN_PART.fullmatch(full)
    return full if found is None else "{2} (in the {1} of {0})".format(*found.groups())


def counts_of(scopes: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, int]:
    """Return the small whole numbers in variables, by name."""
    return {
        shown_variable(scope, name): value
        for scope, variables in scopes
        for name, value in variables.items()
        if type(value) is int and abs(value) < COUNT
    }


def facts_of(values: Iterable[tuple[str, str, First]]) -> dict[str, Any]:
    """Return the first values as JSON: numbers, and digests of tensors and arrays, by scope and variable."""
    found: dict[str, dict[str, int | str]] = {}
    own = {os.getpid(), os.getppid()}
    for scope, name, first in values:
        node = first.node
        if type(node) is int:
            if abs(node) < COUNT and node not in own and not scope.startswith(_PROTECTED):
                found.setdefault(scope, {})[name] = node
        elif isinstance(node, list) and (data := digest_of(node)):
            found.setdefault(scope, {})[name] = data
    numbers = {value for values in found.values() for value in values.values() if isinstance(value, int)}
    return {
        "machine": _machine(),
        "place": _place(),
        "values": found,
        "descriptors": sorted(number for number in numbers if _is_open(number)),
    }


def _is_open(number: int) -> bool:
    """Return whether this is a file descriptor of this process, other than the standard streams."""
    return number > 2 and Path(f"/proc/self/fd/{number}").is_symlink()


def _machine() -> str:
    return os.uname().nodename


def _place() -> int:
    """Return the number of this process on its machine: a spare takes a rank of another number."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def digest_of(node: Any) -> str:
    """Return a digest of the tensors, arrays and long lists of whole numbers in a variable's node; empty if there are none."""
    found, digests = False, hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in _data_in(node):
        found = True
        digests.update(part)
    return digests.hexdigest() if found else ""


def _data_in(node: Any) -> Iterator[bytes]:
    """Yield the bytes of small tensors and arrays, digests of large ones, and long lists of whole numbers."""
    match node:
        case [str(tag), *_] if tag in generators.KINDS:
            return  # one without a seed differs in each process
        case ["tensor" | "array", kind, list(shape), bytes(data), *_]:
            yield f"{kind}{shape}".encode() + data
        case ["large", _, TensorCopy() as copy, *_]:
            yield _digest(copy.tensor)
        case ["large array", kind, shape, TensorCopy() as copy, *_]:
            yield f"{kind}{shape}".encode() + _digest(copy.tensor)
        case ["list" | "tuple", list(parts)] if len(parts) >= _MANY and all(map(_is_index, parts)):
            if not _are_of_machine(parts):
                yield repr(parts).encode()
        case list():
            for part in node:
                yield from _data_in(part)


def _is_index(value: Any) -> bool:
    """Return whether a value is a whole number, and neither an address nor a time in nanoseconds."""
    return type(value) is int and abs(value) < _LARGEST_INDEX


def _are_of_machine(numbers: list[int]) -> bool:
    """Return whether whole numbers may be ports, or CPUs of a place on the machine."""
    are_cpus = len(set(numbers)) == len(numbers) and set(numbers) <= os.sched_getaffinity(0)
    return are_cpus or all(number in _PORTS for number in numbers)


def _digest(tensor: Tensor) -> bytes:
    found = digest(tensor) if tensor.nbytes <= _WHOLE_BYTES else sample(tensor)
    return str(found).encode()
