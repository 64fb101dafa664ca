"""The option `--contract FILE`: writes the refusals that the tests saw between the marks of a document."""

from pathlib import Path

import pytest

BEGIN, END = "<!-- contract: written by `make matrix` -->", "<!-- end of the contract -->"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--contract", type=Path, metavar="FILE", help="write the refusals into this document")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--contract", default=None)
    reports = terminalreporter.stats.get("passed", [])
    rows = [dict(report.user_properties) for report in reports]
    rows = sorted((row for row in rows if "breach" in row), key=lambda row: row["place"])
    if path is None or not rows:
        return
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    lines = ["| what the script does | seen in | what the job ends with |", "| --- | --- | --- |"]
    lines += [f"| {row['breach']} | step {row['step']} | {row['said']} |" for row in rows]
    table = "\n".join(lines)
    path.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")
