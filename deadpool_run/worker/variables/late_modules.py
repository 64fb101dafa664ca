"""The script's Python modules that are imported after its loop began: in an evaluation, say.

Their variables, too, may carry state from step to step. A replacement has to import them before it can set these.
"""

import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from deadpool_run.worker.process.script_files import own_source

_Note = Callable[[str, ModuleType], None]


class LateModules:
    """The modules imported so far, in this order."""

    def __init__(self, note: _Note) -> None:
        """`note` is called in the main thread, right after the import where that is possible. It is kept weakly."""
        self._note = weakref.WeakMethod(note)
        self._waiting: list[tuple[str, ModuleType]] = []
        """Modules that another thread has imported."""
        self.names: list[str] = []
        _FINDER.listener = weakref.WeakMethod(self._imported)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)

    def note_waiting(self) -> None:
        """Note the modules that other threads have imported."""
        while self._waiting:
            self._imported(*self._waiting.pop(0))

    def bring(self, names: Sequence[str]) -> str:
        """Import modules that another process of the rank has imported; return why one cannot be."""
        for name in names:
            if name in sys.modules:
                continue
            try:
                package = name.rpartition(".")[0]  # named before it, if it was imported late: to look inside imports it
                spec = importlib.util.find_spec(name) if not package or package in sys.modules else None
                if (
                    spec is None or own_source(spec.name, spec.origin or "") is None
                ):  # a file with a snapshot cannot name any other module
                    return f"there is no module {name} of the script's"
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - the script's code may raise anything
                return f"the import of {name} failed: {type(error).__name__}: {error}"
        return ""

    def _imported(self, name: str, module: ModuleType) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._waiting.append((name, module))
        elif name not in self.names and (note := self._note()) is not None:
            self.names.append(name)
            note(name, module)


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do. Tells of the script's own after they have run."""

    listener: Any = staticmethod(lambda: None)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        listener = self.listener()
        if listener is None:
            return None
        spec = self._found(name, path, target)
        if spec is not None and spec.loader is not None and own_source(spec.name, spec.origin or ""):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                listener(name, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _found(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            if find is not None and (spec := find(name, path, target)) is not None:
                found: ModuleSpec = spec
                return found
        return None


_FINDER = _Finder()
