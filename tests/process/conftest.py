"""What the end-to-end tests share: unfailed runs to compare with."""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.account import States
from kit.cluster import Cluster

REFERENCE_STEPS = 40


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
