"""docs/gpu.md names the test of each statement."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")))
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert {name for name in named if f"def {name}(" not in text} == set()


def test_a_test_that_the_page_calls_not_run_has_a_variant_for_gpus():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for line in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8").splitlines():
        named = re.findall(r"`(test_\w+)`", line)
        if line.startswith("|") and len(line.split(" | ")) == 5 and named:
            on_gpus = any(f"@on_both\ndef {name}(" in text for name in named)
            assert on_gpus == line.endswith("| not run |") or "`tests/gpu`, not run" in line, line
