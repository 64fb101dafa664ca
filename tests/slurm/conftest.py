"""A Slurm of pretend nodes for the tests that need a real one; they are skipped where there is none."""

from collections.abc import Iterator

import pytest
from kit import slurm_lab
from kit.slurm_lab import SlurmLab


def pytest_collection_modifyitems(items):
    for item in items:
        if {"lab", "shared_lab"} & set(item.fixturenames):
            item.add_marker("slurm")


@pytest.fixture(scope="module")
def shared_lab(tmp_path_factory) -> Iterator[SlurmLab]:
    """Four nodes, for tests that leave them as they were."""
    yield from _lab(tmp_path_factory)


@pytest.fixture
def lab(tmp_path_factory) -> Iterator[SlurmLab]:
    """Four nodes of the test's own."""
    yield from _lab(tmp_path_factory)


def _lab(tmp_path_factory) -> Iterator[SlurmLab]:
    if why := slurm_lab.missing():
        pytest.skip(why)
    made = SlurmLab(tmp_path_factory.mktemp("slurm"))
    try:
        yield made
        print(made.told())  # which pytest shows if the test failed
    finally:
        made.close()
