import sys
from pathlib import Path
from types import ModuleType

import pytest
from kit.world import World, warm_up
from snapshot_kit import Slots

TESTS = f"{Path(__file__).resolve().parents[1]}/"


@pytest.fixture(scope="session")
def _warm():
    warm_up()


@pytest.fixture(autouse=True)
def _alone(request):
    """Hide modules of other tests: as modules of the script, with thousands of variables, they made a test take seconds."""
    used = {request.module.__name__, "conftest"}
    _note_used(request.module, used)
    others = {name: module for name, module in sys.modules.items() if name not in used and _is_of_tests(module)}
    for name in others:
        del sys.modules[name]
    yield
    sys.modules.update(others)


def _is_of_tests(module):
    return (getattr(module, "__file__", None) or "").startswith(TESTS) and not module.__name__.startswith("kit.")


def _note_used(module, used):
    for value in vars(module).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        found = sys.modules.get(name) if isinstance(name, str) and name not in used else None
        if found is not None and _is_of_tests(found):
            used.add(name)
            _note_used(found, used)


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
