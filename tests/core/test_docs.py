"""The documentation's diagrams are those of the code's tables."""

from pathlib import Path

from diagram import diagram

PAGE = Path(__file__).parents[2] / "docs" / "how-recovery-works.md"


def test_the_state_diagrams_are_drawn_from_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    drawn = page.split("<!-- diagram: ")[1].split("-->\n", 1)[1].split("<!-- end of diagram -->")[0]
    assert drawn.strip() == diagram().strip(), "run `python tests/core/diagram.py` and paste what it prints"
