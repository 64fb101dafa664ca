"""Environment variables that a script changes while it trains."""

import os

import pytest

from deadpool_run.worker.codec import copied
from deadpool_run.worker.state.script_environment import ScriptEnvironment


@pytest.fixture
def environment(monkeypatch):
    """It is as before at the end."""
    monkeypatch.setenv("OLD", "1")
    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("DEADPOOL_WORKER", "3")
    monkeypatch.delenv("NEW", raising=False)
    found = ScriptEnvironment()
    yield found
    found.put({})


def change():
    os.environ["OLD"] = "2"
    os.environ["NEW"] = "\udcff"  # a byte that is no text
    del os.environ["GONE"]


def test_changes_come_back_and_later_ones_are_undone(environment):
    environment.begin()
    assert environment.take() == {}
    change()
    changed = copied(environment.take())
    assert changed == {"OLD": "2", "NEW": "\udcff", "GONE": None}
    environment.put({})
    assert (os.environ["OLD"], os.environ["GONE"], "NEW" in os.environ) == ("1", "1", False)
    environment.put(changed)
    assert environment.take() == changed
    os.environ["LATER"] = "1"
    environment.put(changed)
    assert "LATER" not in os.environ


def test_a_replacement_gets_only_what_was_changed(environment, monkeypatch):
    """Another machine has other variables."""
    environment.begin()
    change()
    changed = environment.take()
    environment.put({})
    monkeypatch.setenv("HOME", "/elsewhere")
    replacement = ScriptEnvironment()
    replacement.begin()
    replacement.put(changed)
    assert (os.environ["HOME"], os.environ["OLD"], "GONE" in os.environ) == ("/elsewhere", "2", False)
    replacement.put({})


def test_variables_of_deadpool_run_are_left_alone(environment):
    environment.begin()
    os.environ["DEADPOOL_WORKER"] = "4"
    assert environment.take() == {}
    environment.put({})
    assert os.environ["DEADPOOL_WORKER"] == "4"


def test_it_works_without_the_private_mapping(environment, monkeypatch):
    """As on another implementation of Python."""
    environment.begin()
    change()
    expected = environment.take()
    monkeypatch.setattr(os.environ, "_data", None)
    monkeypatch.setattr(os, "environb", {b"OLD": b"2", b"NEW": b"\xff"})
    assert environment.take().items() >= {("OLD", "2"), ("NEW", "\udcff"), ("GONE", None)}
    monkeypatch.undo()
    assert expected == {"OLD": "2", "NEW": "\udcff", "GONE": None}
