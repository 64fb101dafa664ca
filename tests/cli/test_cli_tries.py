"""docs/command-line.md shows what comes back for lines and scripts that are not right."""

from pathlib import Path

import pytest
from test_cli_docs import PAGE
from tries import PARTS, transcript

START, END = "<!-- tries: made by `python tests/cli/tries.py {}` -->\n", "<!-- end of tries -->"
ROOT = Path(__file__).parents[2]
FIRST_TRIES = {
    1: ("--nprocs 2 train.py",),
    2: ("--nproc-per-nodes 2 train.py",),
    3: ("--spare 1 train.py",),
    4: ("trian.py",),
    5: ("--spares -1 train.py", "--spares one train.py"),
    6: ("--nproc-per-node 0 train.py", "--nproc-per-node gpu train.py"),
    7: ("",),
    8: ("--no-python /bin/true --spares 1",),
    9: ("python train.py",),
    10: ("statsu", "list"),
    11: ("run --no-python /bin/true",),
    12: ("--config site.yaml train.py", "--config broken.yaml train.py"),
    13: ("--no-python /bin/true",),
    14: ("--run-dir /proc/run train.py", "--run-dir site.yaml/run train.py"),
    15: ("--run-id first --nproc-per-node 2 waits.py", "--run-id night --no-python /bin/false"),
    16: ("--nnodes 2 train.py",),
    17: ("--nnodes 2:4 train.py", "--nnodes 2 --spares 2 --rdzv-endpoint localhost:29400 train.py"),
    18: ("--nnodes 2 --rdzv-endpoint localhost:29400 --join-timeout 1 --no-python /bin/true",),
    19: ("--nproc-per-node 2 wrong.py",),
    20: ("raises.py",),
    21: ("no_module.py", "-m nosuch.train", "."),
    22: ("--nproc-per-node 2 late_init.py",),
    23: ("--spares 1 no_init.py",),
    24: ("no_protect.py", "half_protected.py"),
    25: ("--redirects 3 own_loop.py", "no_with.py"),
    26: ("status", "kill-rank 1"),
    27: ("status --run-id night",),
    28: ("kill-rank 7", "kill-rank x", "kill-rank 1 --how nuke"),
    29: ("kill-rank 1 --yes",),
    30: ("--run-id first --nproc-per-node 2 waits.py    (Ctrl-C)",),
    31: (
        "--run-id second --no-python /bin/sh sleep.sh    (SIGTERM)",
        "--run-id second --no-python /bin/sh sleep.sh    (its terminal is closed)",
        "--run-id second --no-python /bin/sh sleep.sh    (kill -9 of the launcher)",
    ),
    32: ("--hang-timeout 10x train.py",),
}
"""The lines of the first tries of a newcomer to the program, by their numbers."""
OTHER = {
    10: "tests/cli/test_cli_app.py::test_help_is_a_command_too",
    23: "tests/core/test_job_status.py::test_a_world_whose_protection_is_overdue_says_why",
}
"""Tests of answers that are not shown: the page that `help` prints, and what comes after a minute."""


def shown(part):
    return PAGE.read_text().partition(START.format(part))[2].partition(END)[0].strip()


@pytest.mark.timeout(1200)  # a dozen jobs: on a machine with much other work each takes half a minute
@pytest.mark.parametrize("part", PARTS)
def test_the_page_shows_what_comes_back(part, tmp_path):
    assert shown(part) == f"```\n{transcript(part, tmp_path).strip()}\n```"


def test_the_page_has_every_first_try():
    prompts = {each for part in PARTS for each in shown(part).splitlines() if each.startswith("$ ")}
    tried = {prompt.partition("deadpool-run")[2].strip() for prompt in prompts}
    assert {number: missing for number, lines in FIRST_TRIES.items() if (missing := {*lines} - tried)} == {}
    for test in OTHER.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()
