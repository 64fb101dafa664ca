"""Frames of the script's running functions, the values of their variables, and how to set them."""

import ctypes
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import CO_GENERATOR, CO_OPTIMIZED
from pathlib import Path
from types import CellType, FrameType, GeneratorType
from typing import Any

from deadpool_run.ids import PACKAGE, is_of_package
from deadpool_run.worker.process.script_files import is_library, note_file

_FOLDER = Path(__file__).parents[2]
_COPIES = sys.version_info < (3, 13)
"""Python before 3.13: `f_locals` of a function is a copy of its variables. Later versions write through."""


def script_frames() -> Iterator[FrameType]:
    """Yield the frames of the script, innermost first."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):  # noqa: SLF001 - the documented way to the caller's variables
        if is_scripts(frame):
            yield frame


def is_scripts(frame: FrameType) -> bool:
    """Return whether the frame runs code of the script."""
    return not is_of_package(str(frame.f_globals.get("__name__", ""))) and not is_library(frame.f_code.co_filename)


def is_integrations(frame: FrameType) -> bool:
    """Return whether the frame runs code of the integration of a framework."""
    return str(frame.f_globals.get("__name__", "")).startswith(f"{PACKAGE}.integrations.")


def note_loop() -> None:
    """Count the function with the step loop, and its package, as the script's, even if the package is installed.

    A generator around the steps, such as a progress bar, is not the loop. The integration of a framework keeps the state of its loop.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):  # noqa: SLF001 - as above
        if is_integrations(frame):
            return
        module = str(frame.f_globals.get("__name__", ""))
        if not is_of_package(module) and not frame.f_code.co_flags & CO_GENERATOR:
            note_file(Path(frame.f_code.co_filename))
            return


def is_own_generator(generator: "GeneratorType[Any, Any, Any]") -> bool:
    """Return whether a generator is one of this library, such as the loop over the steps."""
    return Path(generator.gi_code.co_filename).is_relative_to(_FOLDER)


def function_frames(frames: Iterable[FrameType]) -> Iterator[tuple[str, FrameType]]:
    """Yield the functions among `script_frames()`, each under a unique name.

    Frames of modules are left out: their variables are the module's globals.
    """
    seen: dict[str, int] = {}
    for frame in frames:
        if frame.f_code.co_flags & CO_OPTIMIZED:
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
            seen[name] = seen.get(name, 0) + 1
            yield f"{name}()" + (f" {seen[name]}" if seen[name] > 1 else ""), frame


def module_frames(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Yield those among `script_frames()` that run a module's code. That of a class has a table of its own."""
    running = (frame for frame in frames if not frame.f_code.co_flags & CO_OPTIMIZED)
    return (frame for frame in running if frame.f_locals is frame.f_globals)


def local_variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a function's frame that have a value."""
    found = dict(frame.f_locals)
    _forget(frame)
    return found


def set_local_variables(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Set variables of a function that is running, also those that it shares with functions inside it."""
    frame.f_locals.update(values)
    if _COPIES:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        _forget(frame)


def _forget(frame: FrameType) -> None:
    """Empty the frame's copy of its variables, because it would keep tensors alive that the script no longer needs."""
    if _COPIES:
        frame.f_locals.clear()


def closed_over(cells: Mapping[str, CellType]) -> dict[str, Any]:
    """Return the variables in these closure cells that have a value."""
    found = {}
    for name, cell in cells.items():
        with suppress(ValueError):  # it has no value yet
            found[name] = cell.cell_contents
    return found


def set_closed_over(cells: Mapping[str, CellType], values: Mapping[str, Any]) -> None:
    """Set some variables that a function closes over."""
    for name, value in values.items():
        cells[name].cell_contents = value
