"""The stories find planted bugs."""

import pytest
from shells_planted import PLANTS
from stories import tell

SEEDS = 200


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("plant", "kind"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS])
def test_a_planted_bug_in_the_shells_is_found(plant, kind, monkeypatch):
    plant(monkeypatch)
    for seed in range(SEEDS):
        try:
            tell(seed, kind)
        except AssertionError:
            return
    pytest.fail(f"{SEEDS} stories did not find the bug")
