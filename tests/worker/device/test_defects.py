"""Each defect of the review, planted on purpose, makes its test fail. `python tests/worker/device/test_defects.py` writes the table of docs/gpu.md."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.device.defects import DEFECTS, PLANTED

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- defects: made by `python tests/worker/device/test_defects.py` -->", "<!-- end of the defects -->"
FAILED = 1
"""pytest's exit code if tests ran, and some failed."""


def table():
    lines = ["| | planted | test that fails |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {each.letter} | {each.what} | `{each.test}` |" for each in DEFECTS])


def with_table(page):
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def test_the_page_has_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_planted_defect_makes_its_test_fail(defect):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "kit.device.defects", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"{ROOT / defect.file}", "-k", defect.test],
        env=os.environ | {PLANTED: defect.name, "KIT_LIMIT_S": "30", "PYTHONPATH": str(ROOT / "tests")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == FAILED, f"{done.stdout[-3000:]}\n{done.stderr[-1000:]}"
    assert " passed" not in done.stdout.splitlines()[-1], done.stdout[-3000:]
    assert defect.shows in done.stdout, done.stdout[-3000:]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
