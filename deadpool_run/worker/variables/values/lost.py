"""A stand-in for data that no snapshot holds: a step that uses it is refused, and told why."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from deadpool_run.errors import RefusedError

MADE_LATER = (
    "it was made after the loop had begun, and no snapshot holds functions, groups, data loaders, or modules that are large or have "
    "one of these"
)
MOVED = "it shares memory with a protected tensor, and did not when the loop began"
OVERLAPS = "it shares memory with another variable, and no variable has all of that memory"
SHARED = "other ranks of the node can write to its memory, too"

ASSIGNED = "the code that has it assigns it again before it reads it"


def advice(why: str) -> str:
    """Return what a user can do about a variable that is not kept for this reason."""
    if why == MADE_LATER:
        return "Make all of them before job.steps(), and choose between them in the loop."
    if why == MOVED:
        return (
            "Make tensors that share memory with parameters before job.steps(), or assign a copy (clone()) in the loop."
        )
    if why == SHARED:
        return "Give each rank memory of its own, and exchange values by a collective, such as all_gather()."
    if why == OVERLAPS:
        return (
            "Assign the tensor that has all of the memory to a variable, too, or assign copies (clone()) of its parts."
        )
    if why == ASSIGNED:
        return "Read it in that code itself, not through its frame or from another module, or keep it in an attribute of an object."
    return (
        "If the weights depend on it, call job.protect() with an object that has it (state_dict() and load_state_dict()). If they do "
        "not, assign it in each step before it is read, or call deadpool_run.init(verify=False)."
    )


class LostValue:
    """A stand-in for data that was not kept. Using it raises an error. Appending to it, or printing it, has no effect."""

    __slots__ = ("_lost_as", "_lost_instead_of")

    def __init__(self, name: str, why: str, refuse: Callable[[str], NoReturn], instead_of: Any = None) -> None:
        """`refuse` raises; `instead_of` is the value to put back if the script has not used it."""
        set_slot = object.__setattr__
        set_slot(self, "_lost_as", (name, why, refuse))
        set_slot(self, "_lost_instead_of", instead_of)

    def __getattr__(self, name: str) -> Any:
        if name in _APPENDING and self._lost_instead_of is None:
            return lambda *_args, **_named: None
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse(self)

    def __repr__(self) -> str:
        return f"<{self._lost_as[0]} was lost>"

    def __format__(self, _: str) -> str:
        return repr(self)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _refuse(self)

    @classmethod
    def __torch_function__(cls, _function: Any, _kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(_lost_in((*args, *(kwargs or {}).values())), None)
        return NotImplemented if found is None else _refuse(found)


def raise_refused(why: str) -> NoReturn:
    """Refuse a lost value outside of a job."""
    raise RefusedError(why)


_APPENDING = frozenset({"append", "appendleft", "extend", "add", "update"})
_USES = (
    "bool len length_hint iter next getitem setitem delitem contains call hash eq ne lt le gt ge setattr delattr "
    "add radd iadd sub rsub isub mul rmul imul matmul rmatmul imatmul truediv rtruediv itruediv floordiv rfloordiv mod rmod pow "
    "rpow and rand iand or ror ior xor rxor neg pos abs invert int float complex index round array enter await aiter"
)


def why_lost(value: LostValue) -> str:
    """Return why a value was not kept."""
    why: str = value._lost_as[1]  # noqa: SLF001 - all its attributes but these are the script's
    return why


def refuse_lost(values: Iterable[object]) -> None:
    """Refuse the first value of these that was lost, as its use would."""
    for value in values:
        if type(value) is LostValue:
            _refuse(value)


def kept_back(value: LostValue) -> Any:
    """Return the value that a lost one stands for, if this process still has it, with the memory that it shared; else None."""
    return None if why_lost(value) == OVERLAPS else value._lost_instead_of  # noqa: SLF001 - as above


def _refuse(value: LostValue, *_: Any) -> NoReturn:
    name, why, _ = value._lost_as  # noqa: SLF001 - as above
    refuse: Callable[[str], NoReturn] = value._lost_as[2]  # noqa: SLF001 - as above
    refuse(
        f"{name} is carried from step to step, and snapshots do not keep it: {why}.\n"
        f"A replacement for a lost rank, and a rank that repeats a step, would not have its value. {advice(why)}"
    )


for _use in _USES.split():
    setattr(LostValue, f"__{_use}__", _refuse)


def _lost_in(values: Any) -> Iterator[LostValue]:
    for value in values:
        if type(value) is LostValue:
            yield value
        elif type(value) in (list, tuple):
            yield from _lost_in(value)
