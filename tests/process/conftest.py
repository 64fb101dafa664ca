"""What the end-to-end tests share: unfailed runs to compare with."""

from collections.abc import Callable

import pytest
from kit.account import States
from kit.cluster import Cluster

REFERENCE_STEPS = 40


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], States]:
    """Return every state of an unfailed run of a layout up to a version. Each layout is run once a session."""
    known: dict[str, States] = {}

    def states(layout: str, versions: int) -> States:
        if layout not in known:
            cluster = Cluster(
                tmp_path_factory.mktemp(layout), "--layout", layout, "--steps", str(REFERENCE_STEPS), spares=0
            )
            try:
                assert cluster.wait_exit() == 0, cluster.told()
            finally:
                cluster.close()
            known[layout] = cluster.account.states()
        return {(rank, version): digest for (rank, version), digest in known[layout].items() if version <= versions}

    return states
