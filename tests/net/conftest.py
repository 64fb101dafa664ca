"""Fixtures of jobs over several hosts: namespaces on one bridge, a job on them, unfailed runs to compare with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit import netns
from kit.account import States
from kit.cluster import Cluster
from kit.fleet import Fleet
from kit.netns import Hosts

REFERENCE_STEPS = 40


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Four hosts on one bridge, or as many as the test's parameter says."""
    if why := netns.refused():
        pytest.skip(why)
    hosts = Hosts(getattr(request, "param", 4))
    yield hosts
    hosts.close()


@pytest.fixture
def fleet(tmp_path: Path, net: Hosts) -> Iterator[Callable[..., Fleet]]:
    """Start a job on the hosts: arguments as of `Fleet`, without its folder and its hosts."""
    started: list[Fleet] = []

    def start(*args: str, **options: object) -> Fleet:
        home = tmp_path / f"job{len(started)}"
        home.mkdir()
        started.append(Fleet(home, net, *args, **options))
        return started[-1]

    yield start
    for each in started:
        print(each.told())  # which pytest shows if the test failed
        each.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., States]:
    """Return every state of an unfailed run of a layout on one machine, up to a version. Each is run once a session."""
    known: dict[tuple[str, int, int], States] = {}

    def states(layout: str, versions: int, ranks: int = 6, steps: int = REFERENCE_STEPS) -> States:
        key = layout, ranks, steps
        if key not in known:
            words = ("--layout", layout, "--steps", str(steps))
            cluster = Cluster(tmp_path_factory.mktemp(layout), *words, nproc=ranks, spares=0)
            try:
                assert cluster.wait_exit(timeout_s=300 + steps / 2) == 0, cluster.told()
            finally:
                cluster.close()
            known[key] = cluster.account.states()
        return {(rank, version): digest for (rank, version), digest in known[key].items() if version <= versions}

    return states
