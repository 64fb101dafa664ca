"""Slurm's compressed lists of node names, `gpu[001-004,7],login`, and of numbers, `4(x2),1`: hostlist(3). Pure.

`scontrol show hostnames` expands the first, but is often missing in a container.
"""

import itertools
import re
from collections.abc import Iterator

from deadpool_run.errors import UsageError

MAX_NODES = 1 << 16
"""Slurm's own limit (MAX_SLURM_NODES of slurm_protocol_defs). A longer list is a typing error."""

_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]\s]*\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand(text: str) -> tuple[str, ...]:
    """Return the names of a list in Slurm's order. Raises `UsageError` if it is not such a list."""
    every = itertools.chain.from_iterable(_expand_entry(entry, text) for entry in _entries(text))
    names = tuple(itertools.islice(every, MAX_NODES + 1))
    if len(names) > MAX_NODES:
        raise _bad(text, f"more than {MAX_NODES} nodes")
    return names


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `4(x2),1`: 4, 4, 1. Raises `UsageError`."""
    counts: list[int] = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part)
        if found is None or int(found[2] or 1) + len(counts) > MAX_NODES:
            raise _bad(text, f"{part!r} is neither a number nor a repetition such as 4(x2)")
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _entries(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in {0, 1}:
            raise _bad(text, "its brackets do not match")
        if character == "," and depth == 0:
            yield text[start:position]
            start = position + 1
    if depth:
        raise _bad(text, "its brackets do not match")
    yield text[start:]


def _expand_entry(entry: str, text: str) -> Iterator[str]:
    """Return the names of one entry; the last bracket varies fastest."""
    parts = _PART.findall(entry)
    if not parts or "".join(parts) != entry:
        raise _bad(text, f"{entry!r} is no name")
    choices = [_expand_bracket(part[1:-1], text) if part.startswith("[") else (part,) for part in parts]
    return map("".join, itertools.product(*choices))


def _expand_bracket(inside: str, text: str) -> tuple[str, ...]:
    """Return the numbers of `1-3,7`, as wide as the first of each range is written."""
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _bad(text, f"{part!r} is no range of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < first + MAX_NODES or len(numbers) > MAX_NODES:
            raise _bad(text, f"the range {part!r} is empty or too long")
        numbers += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return tuple(numbers)


def _bad(text: str, why: str) -> UsageError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."  # one line of a terminal
    return UsageError(
        f"the list of nodes {shown!r} cannot be read: {why}\n"
        "it comes from Slurm's environment; add --no-slurm to ignore that, and set --nnodes and --rdzv-endpoint"
    )
