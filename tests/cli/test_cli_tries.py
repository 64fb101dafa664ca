"""docs/command-line.md shows what comes back for lines that are not right."""

from test_cli_docs import PAGE
from tries import transcript

START, END = "<!-- tries: made by `python tests/cli/tries.py` -->\n", "<!-- end of tries -->"


def test_the_page_shows_what_comes_back(tmp_path):
    shown = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert shown.strip() == f"```\n{transcript(tmp_path).strip()}\n```"
