import pytest
from kit.world import World, warm_up
from snapshot_kit import Slots


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


@pytest.fixture
def make_slots(_warm):
    """The slots of so many ranks, closed with the snapshots on them."""
    made = []

    def make(ranks=1):
        made.append(Slots(ranks))
        return made[-1]

    yield make
    for slots in made:
        slots.close()


@pytest.fixture
def slots(make_slots):
    return make_slots()
