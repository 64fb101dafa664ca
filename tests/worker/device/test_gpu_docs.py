"""docs/gpu.md names the test of each statement."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")))
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert {name for name in named if f"def {name}(" not in text} == set()
