"""The script's Python modules that are imported after its loop began: in an evaluation, say.

Their variables, too, may carry state from step to step. A replacement has to import them before it can set these. A step that is
repeated imports its modules again, because what they set in other modules when they were imported is undone with the step.
"""

import importlib
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from deadpool_run.worker.process.script_files import own_source
from deadpool_run.worker.variables.scope import ScopeMark

_Note = Callable[[str, ModuleType], ScopeMark]
_RUN_TWICE = (
    "deadpool-run repeats the step that imported this module, and so the module runs a second time in this process. "
    "If it cannot, import it before the loop."
)


class LateModules:
    """The modules imported so far, in this order."""

    def __init__(self, note: _Note) -> None:
        """`note` is called in the main thread, right after the import where that is possible. It is kept weakly.

        It returns a mark before the module's scopes.
        """
        self._note = weakref.WeakMethod(note)
        self._waiting: list[tuple[str, ModuleType]] = []
        """Modules that another thread has imported."""
        self._marks: dict[str, tuple[ModuleType, ScopeMark]] = {}
        self._undone: dict[str, ModuleType] = {}
        """Modules to be imported again. Kept, so that identities in them are not used again."""
        _FINDER.late = weakref.ref(self)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)

    @property
    def names(self) -> Collection[str]:
        """The names of the modules."""
        return self._marks.keys()

    def note_waiting(self) -> None:
        """Note the modules that other threads have imported."""
        while self._waiting:
            self.imported(*self._waiting.pop(0))

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

    def undo(self, kept: Collection[str]) -> tuple[list[str], ScopeMark] | None:
        """Have the script import again what it has imported since a snapshot; return the names, and a mark before their scopes.

        `kept` are the names at the snapshot. None if nothing was imported since.
        """
        names = [*self._marks]
        undone = next((names[at:] for at, name in enumerate(names) if name not in kept), [])
        if not undone or any(name in kept for name in undone):
            return None
        mark = self._marks[undone[0]][1]
        for name in undone:
            module = self._undone[name] = self._marks.pop(name)[0]
            package, _, part = name.rpartition(".")
            holders = [(sys.modules, name)]
            if package in sys.modules:
                holders.append((vars(sys.modules[package]), part))
            for holder, key in holders:
                if holder.get(key) is module:
                    del holder[key]
        return undone, mark

    def imported(self, name: str, module: ModuleType) -> None:
        """Note a module that has just run."""
        if threading.current_thread() is not threading.main_thread():
            self._waiting.append((name, module))
        elif name not in self._marks and (note := self._note()) is not None:
            self._marks[name] = module, note(name, module)

    def failed(self, name: str, error: Exception) -> None:
        """Note an exception of a module that runs."""
        if name in self._undone:
            error.add_note(_RUN_TWICE)


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do. Tells of the script's own after they have run."""

    late: Callable[[], LateModules | None] = staticmethod(lambda: None)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        late = self.late()
        if late is None:
            return None
        spec = self._found(name, path, target)
        if spec is not None and spec.loader is not None and own_source(spec.name, spec.origin or ""):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                try:
                    run(module)
                except Exception as error:
                    late.failed(name, error)
                    raise
                late.imported(name, module)

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
