"""Names and places for messages: the script's variable for an object, and its running line."""

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from deadpool_run.worker.process.frames import closed_over, is_scripts, script_frames


def path_to(obj: object) -> str:
    """Return the script's variable, or attribute of one, that is the object; an empty string if there is none.

    For a module inside another one, the outermost is named, because scripts protect that.
    """
    paths = [path for frame in script_frames() for path in _paths(frame.f_locals, obj)]
    return min(paths, key=lambda path: (path.count("."), len(path)), default="")


def current_line() -> str:
    """Return the script's running line as file:number; an empty string outside of the script."""
    frame = next(script_frames(), None)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(text: str) -> None:
    """Warn at the script's running line."""
    stack = enumerate(traceback.walk_stack(sys._getframe()), 1)  # noqa: SLF001 - as below
    level = next((level for level, (frame, _) in stack if is_scripts(frame)), 1)
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _paths(variables: Mapping[str, Any], obj: object) -> Iterator[str]:
    for name, value in list(variables.items()):
        if _is_in(value, obj):
            yield name
        elif isinstance(value, FunctionType):
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            yield from (shared for shared, part in closed_over(cells).items() if _is_in(part, obj))
        elif not isinstance(value, nn.Module):
            attributes = getattr(value, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(value, type(sys)):
                yield from (f"{name}.{key}" for key, part in list(attributes.items()) if _is_in(part, obj))


def _is_in(value: object, obj: object) -> bool:
    if value is obj:
        return True
    return (
        isinstance(value, nn.Module) and isinstance(obj, nn.Module) and any(child is obj for child in value.modules())
    )
