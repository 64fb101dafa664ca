"""Installed files belong to libraries, except the package that is run and the one with the step loop."""

import importlib
import sys
import types
from pathlib import Path

import pytest

from deadpool_run.worker.process import script_files
from deadpool_run.worker.process.script_files import (
    ImportedModules,
    is_library,
    note_file,
    note_preloaded,
    note_script,
    own_modules,
)
from deadpool_run.worker.variables.variables import Variables

TRAINER = """
class Trainer:
    def __init__(self):
        self.count = 0

    def fit(self, variables, around=iter):
        for step in around(steps(variables)):
            self.count += 1
        return self.count
"""
BAR = """
def bar(iterable):
    shown = 0
    for each in iterable:
        shown += 1
        yield each
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(script_files, "_installed", set())
    monkeypatch.setattr(script_files, "_folders", set())
    monkeypatch.setattr(script_files, "_preloaded", script_files._Preloaded())
    script_files._has_installed.cache_clear()
    is_library.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return the folder of a package `team` with a module `train`, installed where libraries are."""
    folder = tmp_path / "site-packages" / "team"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "train.py").write_text(TRAINER)
    (folder.parent / "bars.py").write_text(BAR)
    monkeypatch.syspath_prepend(folder.parent)
    yield folder
    for name in ("team", "team.train", "bars"):
        sys.modules.pop(name, None)


def test_the_package_that_is_run_is_the_scripts(installed):
    assert is_library(str(installed / "train.py"))
    note_script("module", "team.train")
    assert not is_library(str(installed / "train.py"))
    assert not is_library(str(installed / "nets" / "layer.py"))
    assert is_library(str(installed.parent / "teams" / "train.py"))


def test_an_installed_file_that_is_run_is_the_scripts_with_its_package(installed):
    note_script("script", str(installed / "train.py"))
    assert not is_library(str(installed / "nets.py"))
    alone = installed.parent / "alone.py"
    note_script("script", str(alone))
    assert not is_library(str(alone))
    assert is_library(str(installed.parent / "other.py"))


def test_an_environment_inside_of_the_scripts_package_stays_a_library(tmp_path):
    (tmp_path / "__init__.py").touch()
    note_script("script", str(tmp_path / "train.py"))
    assert is_library(str(tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "numpy" / "core.py"))


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Return the folder of the script's modules `early`, `later` and `last`, which are not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("early", "later", "last"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def own(found=()):
    return [name for name, _, _ in own_modules() if name not in found]


@pytest.mark.parametrize("preloaded", [False, True])
def test_the_scripts_modules_are_found_whenever_they_were_imported(modules, monkeypatch, preloaded):
    before = own()
    importlib.import_module("early")
    if preloaded:
        note_preloaded()
    assert own(before) == ["early"]
    importlib.import_module("last")
    importlib.import_module("later")
    assert own(before) == ["early", "last", "later"]
    monkeypatch.delitem(sys.modules, "early")
    main = types.ModuleType("__main__")
    main.__file__ = str(modules / "later.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert own(before) in (["last", "later"], ["__main__", "last", "later"])
    assert {name: module for name, module, _ in own_modules()}["__main__"] is main


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("preloaded", [False, True])
def test_the_imported_modules_are_those_of_that_moment(preloaded):
    importlib.import_module("early")
    if preloaded:
        note_preloaded()
    importlib.import_module("later")
    imported, but = ImportedModules(), ImportedModules(but=("early", "later"))
    importlib.import_module("last")
    assert {name for name in sys.modules if name not in imported} == {"last"}
    assert {name for name in sys.modules if name not in but} == {"early", "later", "last"}


def test_a_preloaded_package_that_is_run_is_the_scripts(installed):
    importlib.import_module("team.train")
    note_preloaded()
    assert not {"team", "team.train"} & {*own()}
    note_script("module", "team.train")
    assert {"team", "team.train"} <= {*own()}


def test_torch_is_never_the_scripts():
    import torch  # noqa: PLC0415 - this test's only

    note_script("module", "torch.distributed.run")
    note_file(Path(torch.__file__))
    assert is_library(torch.__file__)


@pytest.mark.parametrize("around", ["iter", "bar"])
def test_an_installed_package_with_the_step_loop_is_the_scripts(installed, around):
    import bars  # noqa: PLC0415 - made by the fixture
    from team import train  # noqa: PLC0415 - as above

    def steps(variables):
        """As our loop: begins, takes a snapshot, runs two more steps, restores it."""
        variables.begin()
        yield 0
        taken = variables.take()
        yield 1
        yield 2
        variables.put(taken)

    # as a module of ours: its frame is not the loop's
    train.steps = types.FunctionType(steps.__code__, {"__name__": "deadpool_run.worker.loop"})
    variables = Variables()
    assert train.Trainer().fit(variables, bars.bar if around == "bar" else iter) == 1
    assert not is_library(train.__file__)
    assert is_library(bars.__file__)


@pytest.mark.parametrize("mode", ["file", "module"])
def test_a_folder_into_which_pip_has_installed_is_a_librarys_unless_the_script_is_there(mode, tmp_path, monkeypatch):
    folder = tmp_path / "installed"
    (folder / "pictures-1.0.dist-info").mkdir(parents=True)
    (folder / "pictures.py").touch()
    for each in (folder, tmp_path):
        monkeypatch.syspath_prepend(each)
    assert is_library(f"{folder}/pictures.py")
    assert not is_library(f"{tmp_path}/pictures.py")
    monkeypatch.chdir(folder)
    note_script(mode, f"{folder}/train.py" if mode == "file" else "pictures")
    assert not is_library(f"{folder}/pictures.py")
