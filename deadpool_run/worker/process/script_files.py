"""The script's own files: neither a library's nor this package's. Imports nothing of torch."""

import contextlib
import importlib.util
import itertools
import runpy
import sys
import sysconfig
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from deadpool_run.ids import PACKAGE, is_of_package

_NEVER_SCRIPTS = (PACKAGE, "torch")
_LIBRARIES = tuple({f"{each}/" for path in sysconfig.get_paths().values() for each in (path, Path(path).resolve())})
"""A prefix may be a link: files are named by either path."""

_MAIN = ("__main__", "__mp_main__")
"""Modules that take the places of others."""

_folders: set[Path] = set()
"""The folder of the script, or the one in which a module is run."""
_installed: set[str] = set()
"""Files of the script, and folders of its packages: they are the script's also where they are installed as a library is."""


def note_script(mode: str, target: str) -> None:
    """Note what this process runs: a file, or in the mode "module" a module by name. A package belongs to the script as a whole."""
    _folders.add(Path.cwd() if mode == "module" else Path(target).absolute().parent)
    _has_installed.cache_clear()
    is_library.cache_clear()
    for place in _places_of_module(target.partition(".")[0]) if mode == "module" else [Path(target).absolute()]:
        note_file(place)


def note_file(file: Path) -> None:
    """Note that the file, or folder, and the package around it are the script's, if they are installed."""
    if not is_library(f"{file}/"):
        return
    while (file.parent / "__init__.py").exists():
        file = file.parent
    if file.name not in _NEVER_SCRIPTS:
        _installed.update(f"{path}/" if path.is_dir() else str(path) for path in (file, file.resolve()))
        is_library.cache_clear()


@cache
def is_library(name: str) -> bool:
    """Return whether the file belongs to neither the script nor us: installed, frozen, or compiled from a string."""
    if _installed and name.startswith(tuple(_installed)):
        return False
    return (
        name.startswith((*_LIBRARIES, "<"))
        or "site-packages" in name
        or "dist-packages" in name
        or name == runpy.__file__
        or any(name.startswith(f"{folder}/") and _has_installed(folder) for folder in sys.path if folder)
    )


@cache
def _has_installed(folder: str) -> bool:
    """Return whether packages were installed into a folder, as by `pip install --target`. The script's own folder does not count."""
    return Path(folder).absolute() not in _folders and next(Path(folder).glob("*.dist-info"), None) is not None


def own_modules(before: Container[str] = ()) -> Iterator[tuple[str, ModuleType, Path]]:
    """Yield name, module and file of the script's imported modules, itself included, without those of `before`.

    Compiled modules are left out. A file may be named by a link, from or to a library's folder: then it is the library's.
    """
    for name in _preloaded.candidates():
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None) or ""
        if module is None or name in before or (where := own_source(name, file)) is None:
            continue
        if where.is_file():  # torch names files that do not exist
            yield name, module, where


def own_source(name: str, file: str) -> Path | None:
    """Return the file of a module if that is the script's, and has its source."""
    if not file.endswith(".py") or is_of_package(name) or is_library(file):
        return None
    where = Path(file).resolve()
    return None if is_library(str(where)) else where


def is_unlisted(module: ModuleType) -> bool:
    """Return whether a module is the script's, and no import finds it: it was run from a file of settings, say, or made by hand."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if sys.modules.get(name) is module or not (own_source(name, str(file)) if file else module.__spec__ is None):
        return False
    return all(place != Path(file or "") for place in _places_of_module(name))


class _Preloaded:
    """The modules that the fork server has imported.

    Nearly all are libraries', and a worker does not touch them to find its script's: each touch of a page copies it.
    """

    def __init__(self) -> None:
        self.names = frozenset[str]()
        self._last, self._own = "", list[str]()

    def note(self) -> None:
        """Note all imported modules."""
        self._own = [name for name, _, _ in own_modules()]
        self.names = frozenset(sys.modules)
        self._last = next(reversed(sys.modules))

    def candidates(self) -> list[str]:
        """Return the names of the modules that may be the script's, in the order of their imports."""
        if _installed:  # these may be preloaded, and were taken for a library's
            return list(sys.modules)
        return list(dict.fromkeys((*_MAIN, *self._own, *reversed(self.later()))))

    def later(self) -> list[str]:
        """Return the names of the modules that were imported later, the last one first."""
        return list(itertools.takewhile(lambda name: name != self._last, reversed(sys.modules)))


_preloaded = _Preloaded()


class ImportedModules:
    """The names of the modules that are imported at one moment, without those in `but`."""

    def __init__(self, but: Container[str] = ()) -> None:
        self._later, self._but = frozenset(_preloaded.later()), but

    def __contains__(self, name: object) -> bool:
        return name not in self._but and (name in self._later or name in _preloaded.names)


def note_preloaded() -> None:
    """Note all modules that are imported so far. Call it before the script runs."""
    _preloaded.note()


def _places_of_module(name: str) -> list[Path]:
    with contextlib.suppress(ImportError, ValueError):  # to run it will say why
        spec = importlib.util.find_spec(name)
        if spec is not None:
            return [Path(each) for each in spec.submodule_search_locations or filter(None, [spec.origin])]
    return []
