"""The variables of running code that it assigns again before it reads them: dead variables, in compilers' terms.

In most loops these are the batch, the loss and the step. A snapshot needs none of them. Variables of a module count too, if only
the module's own code uses them, and not a function in it.
"""

import dis
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from inspect import CO_OPTIMIZED
from operator import or_
from types import CodeType, FrameType
from typing import Any, NamedTuple

_SEES_ALL = frozenset({"locals", "vars", "eval", "exec", "dir", "globals"})
"""Functions that read variables of their caller."""
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
"""The instruction after one of these is not the next one."""
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
"""The same: these jump always."""
_TARGETS, _LOCAL, _NAMED = map(frozenset, ([*dis.hasjrel, *dis.hasjabs], dis.haslocal, dis.hasname))
_OF_MODULES = ("_NAME", "_GLOBAL", "_GLOBALS")
"""Ends of the names of operations on a module's variables. Others of `_NAMED` are on attributes."""
_WORDS = re.compile(r"\w+")
"""The words of a text: libraries such as pandas read variables that texts name."""
_STORES = frozenset({"STORE_FAST", "STORE_FAST_STORE_FAST", "STORE_NAME", "STORE_GLOBAL"})


def dead_variables(frame: FrameType) -> frozenset[str]:
    """Return the variables that running code, of a function or a module, will assign, and on no path reads before that.

    None if it is in a debugger, or if it will read variables by name.
    """
    return frozenset() if frame.f_trace is not None else _dead_at(frame.f_code, frame.f_lasti)


def dead_in_modules(frames: Iterable[FrameType]) -> dict[int, frozenset[str]]:
    """Return the dead variables of modules whose code is running in these frames, by the identity of their tables.

    Code that a module executes has the same table, and may read what the module's own code does not.
    """
    found: dict[int, frozenset[str]] = {}
    for frame in frames:
        table, dead = id(frame.f_globals), dead_variables(frame)
        found[table] = found.get(table, dead) & dead
    return found


class _Graph(NamedTuple):
    """Instructions, and for each the numbers of those that may come next, and of those where an exception continues."""

    steps: list[dis.Instruction]
    after: list[list[int]]
    handlers: list[list[int]]

    def following(self, number: int) -> list[int]:
        """Return all that may come next."""
        return self.after[number] + self.handlers[number]


@lru_cache
def _dead_at(code: CodeType, last: int) -> frozenset[str]:
    """Return the dead variables at a call in a code object; `last` is the offset of its instruction."""
    graph = _graph_of(code)
    here = max(number for number, step in enumerate(graph.steps) if step.offset <= last)
    to_come = _reachable(graph, here)
    used = {step.argval for step in to_come if step.opcode in _NAMED}
    texts = [step.argval for step in to_come if type(step.argval) is str and step.opcode in dis.hasconst]
    is_function = code.co_flags & CO_OPTIMIZED
    shared = set(code.co_cellvars) if is_function else _names_inside(code)
    if _SEES_ALL & (used if is_function else used | shared):
        return frozenset()
    names = {name for step in to_come if step.opname.startswith("STORE_") for name in _variables_of(step)}
    bits = {
        name: 1 << number for number, name in enumerate(sorted(names.difference(shared, *map(_WORDS.findall, texts))))
    }
    live = _live_at(graph, here, bits)
    return frozenset(name for name, bit in bits.items() if not live & bit)


def _graph_of(code: CodeType) -> _Graph:
    steps = list(dis.get_instructions(code))
    at = {step.offset: number for number, step in enumerate(steps)}
    after = [[at[offset] for offset in _next_of(steps, number)] for number in range(len(steps))]
    handlers: list[list[int]] = [[] for _ in steps]
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined] # typeshed lacks it
        for number, step in enumerate(steps):
            if entry.start <= step.offset < entry.end:
                handlers[number].append(at[entry.target])
    return _Graph(steps, after, handlers)


def _next_of(steps: list[dis.Instruction], number: int) -> Iterator[int]:
    """Yield the offsets of the instructions that may come next, without those after an exception."""
    step = steps[number]
    if step.opname not in _ENDS and step.opname not in _JUMPS:
        yield steps[number + 1].offset
    if step.opcode in _TARGETS:
        yield step.argval


def _reachable(graph: _Graph, here: int) -> list[dis.Instruction]:
    found: set[int] = set()
    waiting = graph.following(here)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += graph.following(number)
    return [graph.steps[number] for number in found]


def _live_at(graph: _Graph, here: int, bits: Mapping[str, int]) -> int:
    """Return which variables the code after a call may read: backward analysis of all paths, to a fixed point."""
    live, changed = [0] * len(graph.steps), True
    uses = [(number, *_uses(step, bits)) for number, step in enumerate(graph.steps)][::-1]
    while changed:
        changed = False
        for number, read, assigned in uses:
            found = 0
            for other in graph.after[number]:
                found |= live[other]
            found = read | (found & ~assigned)
            for other in graph.handlers[number]:
                found |= live[other]
            if found != live[number]:
                live[number], changed = found, True
    return reduce(or_, (live[other] for other in graph.following(here)), 0)


def _uses(step: dis.Instruction, bits: Mapping[str, int]) -> tuple[int, int]:
    """Return the variables that an instruction reads, and those that it then assigns."""
    if not (names := _variables_of(step)):
        return 0, 0
    first, *others = (bits.get(name, 0) for name in names)
    if step.opname in _STORES:
        return 0, reduce(or_, others, first)
    if step.opname == "STORE_FAST_LOAD_FAST":
        return others[0] & ~first, first
    return reduce(or_, others, first), 0


def _variables_of(step: dis.Instruction) -> tuple[Any, ...]:
    is_of_module = step.opcode in _NAMED and step.opname.endswith(_OF_MODULES)
    return names_of(step) if step.opcode in _LOCAL or is_of_module else ()


def names_of(step: dis.Instruction) -> tuple[Any, ...]:
    """Return the names of an instruction on variables or attributes: from Python 3.13 on, one may have two."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _names_inside(code: CodeType) -> set[str]:
    """Return the names that functions and classes in a module's code use, and what their texts name."""
    found: set[str] = set()
    for each in code.co_consts:
        if isinstance(each, CodeType):
            texts = (part for part in each.co_consts if isinstance(part, str))
            found.update(each.co_names, _names_inside(each), *map(_WORDS.findall, texts))
    return found
