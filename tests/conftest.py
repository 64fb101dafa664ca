"""Fixtures of every test: a cluster of real processes, and the check that a test leaves this process as it was."""

import gc
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from kit import processes
from kit.cluster import Cluster
from kit.tiers import THOROUGH, function_of

# Machines are busy, and no test asserts how long anything takes.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("untimed")  # the option --hypothesis-profile loads another one later


def pytest_sessionstart() -> None:
    """Have launchers begin with the usual SIGHUP, also if these tests run under nohup, which they would respect."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs over several hosts run one at a time: two dozen processes each are enough for the time-outs between hosts.

    Of the tests that take long, `make test` runs the first of several cases, and `make test-thorough` the others.
    """
    cases = Counter(function_of(item) for item in items if not item.get_closest_marker("slow"))
    begun: set[str] = set()
    for item in items:
        if isinstance(item, pytest.Function) and "net" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("hosts"))
        function = function_of(item)
        if function in THOROUGH and not item.get_closest_marker("slow"):
            if function in begun or cases[function] == 1:
                item.add_marker("thorough")
            begun.add(function)


@pytest.fixture(autouse=True)
def _nothing_leaks_here() -> Iterator[None]:
    """Descriptors (memfds and sockets among them), threads and children of the test process are as before the test."""
    gc.freeze()  # to look through what was there before, torch above all, takes longer than most tests
    before = (processes.descriptors(), set(threading.enumerate()), processes.children())
    yield
    gc.collect()
    descriptors = {fd: of for fd, of in processes.descriptors().items() if before[0].get(fd) != of}
    threads = set(threading.enumerate()) - before[1]
    children = processes.children() - before[2]
    assert not descriptors, f"descriptors that the test left open: {descriptors}"
    assert not threads, f"threads that the test left running: {threads}"
    assert not children, f"children that the test did not wait for: {children}"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Start a job: arguments as of `Cluster`, without its folder. Whatever is left of it is found at the end."""
    started: list[Cluster] = []

    def start(*args: str, **options: object) -> Cluster:
        home = tmp_path / f"job{len(started)}"
        home.mkdir()
        started.append(Cluster(home, *args, **options))
        return started[-1]

    yield start
    for each in started:
        print(each.told())  # which pytest shows if the test failed
        each.close()
