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
