"""Links between README, documentation and recipes lead somewhere, also to a heading. The built site is checked by `make docs`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]
CODE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def prose(path):
    return CODE.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found.add(re.sub(r"\s", "-", words))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(other), f"{page.name}: {target}"


def test_the_home_page_leads_to_every_page():
    named = set(re.findall(r"\]\(docs/([\w-]+\.md)", PAGES[0].read_text(encoding="utf-8")))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}
