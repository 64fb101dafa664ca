"""Shared by the end-to-end tests: unfailed runs to compare with, and `--on-device FILE`.

With it, the ladder's jobs run on the fake device, and the tables of the document are written.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from device_page import with_tables
from kit.account import States
from kit.cluster import Cluster
from kit.device.fake_communicator import VIOLATIONS_VARIABLE

REFERENCE_STEPS = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-device", type=Path, metavar="FILE", help="run the ladder on the fake device; write its table"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--on-device", default=None)
    if path is None:
        return
    reports = [report for each in ("passed", "failed") for report in terminalreporter.stats.get(each, [])]
    found = [(dict(report.user_properties), report.passed) for report in reports if report.when == "call"]
    cells = {each["layout"]: each["cells"] for each, _ in found if "cells" in each}
    outcomes = [(each["rung"], passed) for each, passed in found if "rung" in each]
    if cells and outcomes:
        path.write_text(with_tables(path.read_text(encoding="utf-8"), cells, outcomes), encoding="utf-8")


@pytest.fixture
def cluster(
    cluster: Callable[..., Cluster],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> Iterator[Callable[..., Cluster]]:
    """Start a job, one of the ladder on the fake device if that was asked for."""
    on_device = request.config.getoption("--on-device", default=None) is not None
    if not on_device or request.module.__name__ != "test_ladder":
        yield cluster
        return
    record_property("rung", request.function.__name__)
    violations = tmp_path / "violations"
    jobs: list[Cluster] = []

    def start(*args: str, **options: object) -> Cluster:
        jobs.append(cluster(*args, env={"FAKE_DEVICE": "1", VIOLATIONS_VARIABLE: str(violations)}, **options))
        return jobs[-1]

    yield start
    assert all(told["launches"] for job in jobs for told in job.account.of("device")), "it ran over Gloo"
    assert not violations.exists(), violations.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def unfailed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> States:
    """Return every state of a run without a fault, of as many ranks and steps as the module says."""
    steps, ranks = request.module.STEPS, request.module.RANKS
    job = Cluster(tmp_path_factory.mktemp("unfailed"), "--steps", str(steps), nproc=ranks, spares=0)
    try:
        assert job.wait_exit() == 0, job.told()
    finally:
        job.close()
    return job.account.states()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], States]:
    """Return every state of an unfailed run of a layout up to a version. Each layout is run once a session.

    Processes of one session that share the tests share the runs too: the first to need one makes it, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    known: dict[str, States] = {}

    def states(layout: str, versions: int) -> States:
        if layout not in known:
            with (shared / f"reference-{layout}.json").open("a+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                told = file.read()
                if not told:
                    told = json.dumps(run(tmp_path_factory.mktemp(layout), layout))
                    file.write(told)
            known[layout] = {(rank, version): digest for rank, version, digest in json.loads(told)}
        return {(rank, version): digest for (rank, version), digest in known[layout].items() if version <= versions}

    return states


def run(home: Path, layout: str) -> list[tuple[int, int, str]]:
    """Return rank, version and digest of every state of an unfailed run."""
    cluster = Cluster(home, "--layout", layout, "--steps", str(REFERENCE_STEPS), spares=0)
    try:
        assert cluster.wait_exit() == 0, cluster.told()
    finally:
        cluster.close()
    return [(*where, digest) for where, digest in cluster.account.states().items()]
