import pytest
from kit.world import World, warm_up


@pytest.fixture(scope="session")
def _warm():
    warm_up()


@pytest.fixture
def make_world(_warm):
    worlds = []

    def make(size):
        worlds.append(World(size))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
