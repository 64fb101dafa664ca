"""Attributes that the script assigns to modules and classes of libraries come back, also in another process of the rank."""

import colorsys
import fractions
import sys
import textwrap
from pathlib import Path

import pytest
import torch.nn.functional
from snapshot_kit import in_child

from deadpool_run.worker.process import script_files
from deadpool_run.worker.variables.variables import Variables

WAYS = {
    "a module": "colorsys.seen = value",
    "added to": "torch.nn.functional.__dict__.setdefault('seen', 0); torch.nn.functional.seen += value",
    "several": "colorsys.seen, colorsys.other = value, -value",
    "an inner module": "torch.nn.functional.seen = value",
    "a class": "fractions.Fraction.seen = value",
    "setattr": "setattr(fractions.Fraction, 'seen', value)",
    "imported in the function": "import colorsys; colorsys.seen = value",
    "imported from a package": "from torch.nn import functional; functional.seen = value",
    "imported under its path": "import torch.nn; torch.nn.functional.seen = value",
    "an object of its own": "colorsys.seen = Own(value)",
    "in a function inside": "(lambda: setattr(colorsys, 'seen', value))()",
    "a function of a library": "import torch.nn.functional as F; F.celu = F.selu if value % 2 else F.gelu",
}
SCRIPT = """
import colorsys, fractions, torch.nn.functional
class Own:
    def __init__(self, value):
        self.value = value
def step(value):
    {way}
"""
PLACES = (colorsys, torch.nn.functional, fractions.Fraction)


def seen():
    found = (vars(place).get(name) for place in PLACES for name in ("seen", "other", "celu"))
    return [vars(each) if type(each).__name__ == "Own" else each for each in found]


def values(script, taken):
    """Run three steps, take a snapshot, run three more and put it back; with a snapshot of another process, put that after a step."""
    script_files.note_preloaded()
    sys.path.insert(0, str(script))
    import steps  # noqa: PLC0415 - the script

    variables = Variables()
    variables.begin()
    if taken:
        steps.step(1)
        variables.put(taken)
        return seen()
    for value in range(3):
        steps.step(value)
    kept, before = variables.take(), seen()
    for value in range(3, 6):
        steps.step(value)
    assert seen() != before
    variables.put(kept)
    return before, seen(), kept


def named(found):
    return [each.__name__ if callable(each) else each for each in found]


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("way", WAYS)
def test_an_assigned_attribute_comes_back(tmp_path: Path, way):
    (tmp_path / "steps.py").write_text(textwrap.dedent(SCRIPT).format(way=WAYS[way]))
    before, after, kept = in_child(values, tmp_path, {})
    assert named(after) == named(before)
    assert named(in_child(values, tmp_path, kept)) == named(before)
