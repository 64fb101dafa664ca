"""Variables of the script's modules that are imported during training come back, also in a process that has not imported them."""

import importlib
import sys
import threading

import msgspec
import pytest

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.late_modules import _FINDER
from deadpool_run.worker.variables.variables import Variables

SOURCE = """
import random

count, seen, start = 0, [], random.random()

class Mean:
    total = 0.0

def add(value, memory={}):
    global count
    count += 1
    seen.append(value)
    Mean.total += value
    memory[value] = count
    return count, len(seen), Mean.total, len(memory)
"""


@pytest.fixture
def name(tmp_path, monkeypatch):
    (tmp_path / "evaluation.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield "evaluation"
    sys.modules.pop("evaluation", None)


def begun():
    variables = Variables()
    variables.begin()
    return variables


def test_they_come_back_in_the_same_process(name):
    variables = begun()
    before = variables.take()
    module = importlib.import_module(name)
    module.add(2.0)
    first = variables.take()
    assert module.add(5.0) == (2, 2, 7.0, 2)
    variables.put(first)
    assert module.add(5.0) == (2, 2, 7.0, 2)
    variables.put(before)
    assert module.add(5.0) == (1, 1, 5.0, 1), "as it was imported"


def test_they_come_back_in_a_process_that_has_not_imported_them(name):
    variables = begun()
    module = importlib.import_module(name)
    module.add(2.0)
    taken, start = variables.take(), module.start
    del sys.modules[name]
    replacement = begun()
    replacement.put(taken)
    module = sys.modules[name]
    assert module.start == start, "a number that is drawn at the import"
    assert module.add(5.0) == (2, 2, 7.0, 2)
    assert replacement.take()["of the script"] != taken["of the script"]


def test_objects_of_their_classes_come_back(name):
    mean = None
    variables = begun()
    mean = importlib.import_module(name).Mean()
    mean.total = 3.0
    taken = variables.take()
    mean.total = 4.0
    variables.put(taken)
    assert mean.total == 3.0
    del sys.modules[name]
    begun().put(taken)
    assert type(mean) is sys.modules[name].Mean
    assert mean.total == 3.0


def test_another_thread_may_import_them(name):
    variables = begun()
    thread = threading.Thread(target=importlib.import_module, args=(name,))
    thread.start()
    thread.join()
    module = sys.modules[name]
    module.add(2.0)
    taken = variables.take()
    module.add(5.0)
    variables.put(taken)
    assert module.add(5.0) == (2, 2, 7.0, 2)


@pytest.mark.parametrize(
    "other", ["this", "antigravity.no", "torch.utils.bottleneck", "no_such_module", "deadpool_run.cli"]
)
def test_a_snapshot_cannot_name_other_modules(name, other):
    variables = begun()
    importlib.import_module(name)
    taken = variables.take()
    content = msgspec.msgpack.decode(taken["of the script"])
    assert content["imported modules"] == {name: None}
    content["imported modules"] = {other: None}
    known = other in sys.modules
    if not known:
        with pytest.raises(RefusedError, match=rf"no module {other} of the script's"):
            variables.put({**taken, "of the script": msgspec.msgpack.encode(content)})
    assert (other in sys.modules) is known
    assert "antigravity" not in sys.modules


def test_an_import_that_fails_is_refused_with_its_reason(name, tmp_path):
    variables = begun()
    importlib.import_module(name)
    taken = variables.take()
    del sys.modules[name]
    (tmp_path / "evaluation.py").write_text("raise OSError('no table')")
    importlib.invalidate_caches()
    with pytest.raises(
        RefusedError, match=r"the import of evaluation failed: OSError: no table\.\nImport it before the loop"
    ):
        begun().put(taken)


def test_imports_of_libraries_are_left_alone(name):
    variables = begun()
    begun()
    assert sys.meta_path.count(_FINDER) == 1
    assert _FINDER.find_spec("this", None) is not None
    assert "exec_module" not in vars(_FINDER.find_spec("this", None).loader)
    assert "imported modules" not in msgspec.msgpack.decode(variables.take()["of the script"])


RATES = {}
"""Rates that modules of the tests register."""
RUNS = set()
REGISTERING = """
from {here} import RATES

assert "late" not in RATES
RATES["late"] = len(RATES) + 0.5

def scaled(value):
    return RATES["late"] * value

class Kind:
    count = 0
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the script's, with a module that registers something in another module of the script's."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("names = []")
    (folder / "late.py").write_text(f"from plugins import inner\n{REGISTERING.format(here=__name__)}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield "plugins"
    for name in [name for name in sys.modules if name.partition(".")[0] == "plugins"]:
        del sys.modules[name]
    RATES.clear()


def imported(package):
    """Import the module as a script does, and change what it has."""
    late = importlib.import_module(f"{package}.late")
    late.Kind.count += 1
    late.inner.names.append("late")
    return late


def of_package(taken):
    """Return what a snapshot has of the package, by scope."""
    content = msgspec.msgpack.decode(taken["of the script"])
    return {scope: nodes for scope, nodes in content.items() if scope.startswith("plugins")}


def test_a_step_that_is_repeated_imports_its_modules_again(package):
    """Again and again, each time with the same names, as in a process that imports them once."""
    table = RATES
    variables = begun()
    before = variables.take()
    imported(package)
    once = of_package(variables.take())
    assert len(once) > 2
    for _ in range(3):
        variables.put(before)
        assert table == {}, "what the import has set is undone"
        assert not [name for name in sys.modules if name.startswith("plugins")]
        late = imported(package)
        assert (late.scaled(2.0), late.Kind.count, late.inner.names) == (1.0, 1, ["late"])
        assert of_package(variables.take()) == once


def test_what_a_snapshot_has_is_not_imported_again(package):
    variables = begun()
    first = imported(package)
    taken = variables.take()
    first.inner.names.append("more")
    variables.put(taken)
    assert importlib.import_module(f"{package}.late") is first
    assert (RATES["late"], first.inner.names) == (0.5, ["late"])


def test_only_what_came_after_a_snapshot_is_imported_again(package, name):
    variables = begun()
    evaluation = importlib.import_module(name)
    taken = variables.take()
    first = imported(package)
    variables.put(taken)
    assert importlib.import_module(name) is evaluation
    assert imported(package) is not first
    taken = variables.take()
    assert evaluation.add(2.0) == (1, 1, 2.0, 1)
    sys.modules["plugins"].late.inner.names.append("more")
    variables.put(taken)
    assert evaluation.add(2.0) == (1, 1, 2.0, 1)
    assert sys.modules["plugins"].late.inner.names == ["late"]


def test_a_package_of_set_up_imports_its_modules_again(package):
    """`from package import module` takes what the package has, without an import."""
    importlib.import_module(package)
    variables = begun()
    before = variables.take()
    imported(package)
    variables.put(before)
    assert not hasattr(sys.modules[package], "late")
    assert imported(package).inner.names == ["late"]


def test_a_module_that_cannot_run_twice_says_why_it_does(package, tmp_path):
    variables = begun()
    before = variables.take()
    RUNS.clear()
    (tmp_path / package / "late.py").write_text(
        f"from {__name__} import RUNS\nif not RUNS.isdisjoint([1]): 1 / 0\nRUNS.add(1)"
    )
    importlib.import_module(f"{package}.late")
    variables.put(before)
    RUNS.add(1)  # as what a library keeps, which no snapshot has
    with pytest.raises(ZeroDivisionError) as raised:
        importlib.import_module(f"{package}.late")
    assert "import it before the loop" in raised.value.__notes__[0]
