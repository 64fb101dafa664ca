"""The tables of docs/gpu.md on jobs on the fake device: `make test-device` writes what the tests found."""

from collections import Counter

NAMES = {"ddp-full": "DDP", "fsdp": "FSDP2", "hsdp": "HSDP", "tp": "TP and FSDP2", "pp": "PP"}
BEGIN, END = "<!-- jobs: made by `make test-device` -->", "<!-- end of the jobs -->"


def matrix(cells):
    """Return a table: a layout a line, a place of death a column. `cells` has the places of each layout."""
    places = list(next(iter(cells.values())))
    lines = [f"| a rank dies in | {' | '.join(places)} |", "| --- " * (len(places) + 1) + "|"]
    return "\n".join(
        lines + [f"| {NAMES[layout]} | {' | '.join(cells[layout].values())} |" for layout in NAMES if layout in cells]
    )


def ladder(outcomes):
    """Return a table of the tests of the ladder, by name: how many of their cases came out exact."""
    cases, exact = Counter(name for name, _ in outcomes), Counter(name for name, passed in outcomes if passed)
    lines = ["| what is lost | cases | as promised |", "| --- | --- | --- |"]
    rows = [f"| {name.removeprefix('test_').replace('_', ' ')} | {cases[name]} | {exact[name]} |" for name in cases]
    return "\n".join(lines + rows)


def with_tables(page, cells, outcomes):
    """Return the page with new tables."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{matrix(cells)}\n\n{ladder(outcomes)}\n\n{END}{rest.split(END)[1]}"
