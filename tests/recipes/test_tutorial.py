"""The tutorial's changes are those between its two scripts. `make dist` checks the second one."""

import re
from difflib import ndiff

from launches import RECIPES

PAGE = RECIPES.parent / "docs" / "tutorial.md"


def test_the_page_shows_every_change():
    scripts = ((RECIPES / "tutorial" / name).read_text(encoding="utf-8") for name in ("train_torchrun.py", "train.py"))
    before, after = (text.splitlines() for text in scripts)
    # The body of the loop is indented by as much as before, so that a diff shows the changes only.
    changes = {line[0] + line[2:] for line in ndiff(before, after) if line[0] in "+-" and line[2:].strip()}
    blocks = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    shown = {line for block in blocks for line in block.splitlines() if line[:1] in {"+", "-"}}
    assert shown == changes
