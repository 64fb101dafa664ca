"""The option `--matrix FILE`: writes the results of the matrix's tests between the marks of a document."""

from pathlib import Path

import pytest
from matrix import COLUMNS, ITEMS, PHASES, RANKS

BEGIN, END = "<!-- matrix: written by `make matrix` -->", "<!-- end of the matrix -->"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", type=Path, metavar="FILE", help="write the matrix into this document")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--matrix", default=None)
    if path is None:
        return
    reports = [report for each in ("passed", "failed") for report in terminalreporter.stats.get(each, [])]
    found = [dict(report.user_properties) for report in reports]
    cells = {properties["item"]: properties["cells"] for properties in found if "cells" in properties}
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{table(known(old) | cells)}\n{END}{after}", encoding="utf-8")


def known(text: str) -> dict[str, dict[str, str]]:
    """Return the cells of an existing table, so that a run of some items keeps the others."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    return {item: dict(zip(COLUMNS, cells, strict=True)) for item, *cells in rows if item in ITEMS}


def table(cells: dict[str, dict[str, str]]) -> str:
    """Return the matrix in Markdown: a line for each item, a column for each phase."""
    missing = [item for item in ITEMS if item not in cells]
    lines = [
        f"| what a loop does, on {RANKS} ranks | as torchrun | {' | '.join(PHASES)} |",
        f"| --- {'| --- ' * len(COLUMNS)}|",
        *(f"| {item} | {' | '.join(cells[item][each] for each in COLUMNS)} |" for item in ITEMS if item in cells),
    ]
    green = sum(cell == "exact" for row in cells.values() for cell in row.values())
    lines += ["", f"{len(cells)} items, {len(cells) * len(COLUMNS)} cells, {green} of them exact."]
    lines += [f"Not run: {item}." for item in missing]
    return "\n".join(lines) + "\n"
