"""torch's own files of one version, read without importing them: sources, stubs, headers, and the names that are bound in C++.

    python tests/worker/torch_files.py WHEEL ...    # keeps what is read of some wheels in .torch-files/VERSION

`make test-torch-api` fetches a wheel of every supported version for it: macOS's are the small ones.
"""

import ast
import functools
import importlib.util
import mmap
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".torch-files"
SOURCES = (".py", ".pyi", "PyProcessGroup.hpp")
LIBRARY = "torch/lib/libtorch_python"


class TorchFiles:
    """The files below one folder that holds `torch/`."""

    def __init__(self, folder):
        self.folder = folder
        text = (folder / "torch" / "version.py").read_text(encoding="utf-8")
        self.version = re.search(r"__version__ = '([\d.]+)", text)[1]
        self.series = tuple(map(int, self.version.split(".")[:2]))

    @functools.cache  # noqa: B019 - there are four of these
    def _tree(self, file):
        path = self.folder / file
        return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None

    def has_file(self, file):
        return (self.folder / file).is_file()

    def defines(self, file, owner, name):
        """Whether a file defines a name: at its top, or in the class `owner` or on that class's objects."""
        return name in self._names(file, owner)

    @functools.cache  # noqa: B019 - as above
    def _names(self, file, owner):
        tree = self._tree(file)
        if tree is None or not owner:
            return _bound(tree, classes=False) if tree is not None else set()
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
        return {name for each in classes for name in _bound(each)}

    def methods(self, file, owner):
        """Return the methods and properties that a class of a stub has."""
        classes = [node for node in ast.walk(self._tree(file)) if isinstance(node, ast.ClassDef) and node.name == owner]
        return {node.name for each in classes for node in each.body if isinstance(node, ast.FunctionDef)}

    def binds(self, name):
        """Whether C++ binds the name for Python: it is a string of its own in torch's library."""
        library = next(self.folder.glob(f"{LIBRARY}.*"))
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(b"\0" + name.encode() + b"\0") >= 0

    def asked_of_groups(self):
        """Return the methods of a Python group that torch's C++ code calls."""
        header = next((self.folder / "torch" / "include").rglob("PyProcessGroup.hpp"))
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
        group = text[text.index("using ProcessGroup::ProcessGroup") :]
        by_macro = re.findall(r"OVERRIDE\w*\(\s*(?:[^;()]*?,\s*)?ProcessGroup,\s*(\w+)", group)
        by_name = re.findall(r"get_override\([^;]*?\"(\w+)\"", group)
        by_attribute = re.findall(r"self\.attr\(\"(\w+)\"\)", group)
        return {*by_macro, *by_name, *by_attribute}


def _bound(scope, *, classes=True):
    """Return the names that a class or module binds in its body, and with `classes` those that its methods set on self."""
    found = set()
    for node in ast.walk(scope) if classes else _top(scope):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.add(target.id)
                elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    found |= {target.attr} if target.value.id == "self" else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__setattr__":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, (ast.ImportFrom, ast.Import)) and not classes:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _top(module):
    """Yield what a module executes as it is imported, within `if` and `try` too."""
    for node in module.body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from (each for each in ast.walk(node) if each is not node)


def installed():
    """Return the files of the torch that is installed."""
    return TorchFiles(Path(importlib.util.find_spec("torch").origin).parents[1])


def kept():
    """Return the files of every version that was fetched."""
    return [TorchFiles(folder) for folder in sorted(KEPT.glob("[0-9]*"))] if KEPT.is_dir() else []


def keep(wheel):
    """Unpack of a wheel what is read."""
    unfinished = KEPT / f"unfinished-{wheel.name}"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(SOURCES) or name.startswith(f"{LIBRARY}.")]
        archive.extractall(unfinished, members=names)
    unfinished.rename(KEPT / wheel.name.split("-")[1])


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        keep(Path(argument))
