"""The local variables of a running function that it assigns again before it reads them: dead variables, in compilers' terms.

In most loops these are the batch, the loss and the step. A snapshot needs none of them.
"""

import dis
from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from operator import or_
from types import CodeType, FrameType

_SEES_ALL = frozenset({"locals", "vars", "eval", "exec", "dir"})
"""Functions that read the variables of their caller."""
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
"""The instruction after one of these is not the next one."""
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
"""The same: these jump always."""
_TARGETS, _LOCAL = frozenset((*dis.hasjrel, *dis.hasjabs)), frozenset(dis.haslocal)


def dead_variables(frame: FrameType) -> frozenset[str]:
    """Return the names of a running function's variables whose present values it cannot read any more.

    None if it is in a debugger, or if it reads variables by name.
    """
    return frozenset() if frame.f_trace is not None else _dead_at(frame.f_code, frame.f_lasti)


@lru_cache
def _dead_at(code: CodeType, last: int) -> frozenset[str]:
    """Return the dead variables at a call in a function; `last` is the offset of its instruction."""
    if _SEES_ALL.intersection(code.co_names):
        return frozenset()
    live = _live_at(code, last)
    dead = (name for number, name in enumerate(code.co_varnames) if not live >> number & 1)
    return frozenset(dead).difference(code.co_cellvars, _texts_in(code))


def _live_at(code: CodeType, last: int) -> int:
    """Return which variables the code after a call may read, as bits: backward analysis of all paths, to a fixed point."""
    steps = list(dis.get_instructions(code))
    bits = {name: 1 << number for number, name in enumerate(code.co_varnames)}
    at = {step.offset: number for number, step in enumerate(steps)}
    after = [[at[offset] for offset in _next_of(steps, number)] for number in range(len(steps))]
    handlers: list[list[int]] = [[] for _ in steps]
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined] # typeshed lacks it
        for number, step in enumerate(steps):
            if entry.start <= step.offset < entry.end:
                handlers[number].append(at[entry.target])
    live, changed = [0] * len(steps), True
    each_use = [(number, *_uses(step, bits)) for number, step in enumerate(steps)][::-1]
    while changed:
        changed = False
        for number, read, assigned in each_use:
            found = 0
            for other in after[number]:
                found |= live[other]
            found = read | (found & ~assigned)
            for other in handlers[number]:
                found |= live[other]
            if found != live[number]:
                live[number], changed = found, True
    here = max(number for number, step in enumerate(steps) if step.offset <= last)
    return reduce(or_, (live[other] for other in (*after[here], *handlers[here])), 0)


def _next_of(steps: list[dis.Instruction], number: int) -> Iterator[int]:
    """Yield the offsets of the instructions that may come next, without those after an exception."""
    step = steps[number]
    if step.opname not in _ENDS and step.opname not in _JUMPS:
        yield steps[number + 1].offset
    if step.opcode in _TARGETS:
        yield step.argval


def _uses(step: dis.Instruction, bits: Mapping[str, int]) -> tuple[int, int]:
    """Return the variables that an instruction reads, and those that it then assigns. From Python 3.13 on, one may have two."""
    if step.opcode not in _LOCAL:
        return 0, 0
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    # Python 3.11 has one operation for variables and for those that functions inside share: these are never dead.
    first, *others = (bits.get(name, 0) for name in names)
    if step.opname in ("STORE_FAST", "STORE_FAST_STORE_FAST"):
        return 0, reduce(or_, others, first)
    if step.opname == "STORE_FAST_LOAD_FAST":
        return others[0] & ~first, first
    return reduce(or_, others, first), 0


def _texts_in(code: CodeType) -> Iterator[str]:
    """Yield the words in the texts of a function: libraries such as pandas read variables that texts name."""
    for each in code.co_consts:
        if isinstance(each, str):
            yield from "".join(letter if letter.isidentifier() or letter.isdigit() else " " for letter in each).split()
