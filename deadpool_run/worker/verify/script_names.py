"""The name by which a script knows an object, for messages that say which line to write."""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any

from torch import nn

_OWN = __package__.partition(".")[0]


def path_to(obj: object) -> str:
    """Return a variable of the script's that is the object, or an attribute of one; an empty string if there is none.

    Of modules the outermost that has the object in it is named, for that is what a script protects.
    """
    paths = [path for frame in _frames() for path in _paths(frame.f_locals, obj)]
    return min(paths, key=lambda path: (path.count("."), len(path)), default="")


def place() -> str:
    """Return the script's line that runs, as file and number; an empty string outside of it."""
    frame = next(_frames(), None)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _frames() -> Iterator[FrameType]:
    """Yield the script's frames: those that are neither ours nor torch's."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the documented way to the caller's variables
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in (_OWN, "torch", "runpy"):
            yield frame
        frame = frame.f_back


def _paths(variables: Mapping[str, Any], obj: object) -> Iterator[str]:
    for name, value in list(variables.items()):
        if _is_in(value, obj):
            yield name
        elif isinstance(value, FunctionType):
            yield from _closed_over(value, obj)
        elif not isinstance(value, nn.Module):
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(value, type(sys)):
                yield from (f"{name}.{key}" for key, part in list(attributes.items()) if _is_in(part, obj))


def _closed_over(function: FunctionType, obj: object) -> Iterator[str]:
    """Yield the variables of an enclosing function that a function uses."""
    for name, rank_entry in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = rank_entry.cell_contents
        except ValueError:  # not bound yet
            continue
        if _is_in(value, obj):
            yield name


def _is_in(value: object, obj: object) -> bool:
    if value is obj:
        return True
    return (
        isinstance(value, nn.Module) and isinstance(obj, nn.Module) and any(child is obj for child in value.modules())
    )
