"""The tests that take long, so that `make test` leaves out most of their cases.

    python -m pytest -m 'not slow and not slurm and not frameworks' -n 2 --durations=0 --durations-min=0.05 > durations
    python tests/kit/tiers.py durations     writes tests/thorough.txt

A test is a file and a function. The list has those that take the most time, but for `MAIN_PATHS`, until the rest takes `BUDGET_S`.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parents[1] / "thorough.txt"
THOROUGH = frozenset(LIST.read_text(encoding="utf-8").split())
BUDGET_S = 1280.0
"""Of all test processes together: two take half of it each."""
MAIN_PATHS = frozenset(
    {
        "tests/cli/test_cli_live.py::test_a_live_job_is_seen_and_a_killed_rank_is_seen_replaced",
        "tests/loops/test_loops.py::test_a_death_in_every_phase",
        "tests/net/test_two_hosts.py::test_a_host_that_loses_its_power",
        "tests/process/test_drain.py::test_a_drained_rank_moves_at_a_step_s_end",
        "tests/process/test_durable.py::test_torch_alone_can_load_it",
        "tests/process/test_fake_device.py::test_a_death_in_every_phase_of_a_loop_on_a_device",
        "tests/process/test_fake_device.py::test_rungs_of_the_ladder_on_a_device",
        "tests/process/test_hot_spares.py::test_a_spare_goes_on_as_the_rank_that_it_has_rehearsed",
        "tests/recipes/test_gpt.py::test_the_demo_shows_that_nothing_was_lost",
        "tests/recipes/test_minimal.py::test_a_killed_rank_does_not_change_the_weights",
        "tests/recipes/test_titan.py::test_a_killed_rank_does_not_change_a_bit",
        "tests/worker/device/test_doctor_conformance.py::test_every_behaviour_is_seen_on_a_device_that_behaves",
        "tests/worker/groups/test_collectives_differential.py::test_deadpool_gives_what_gloo_gives",
    }
)
"""Tests that `make test` runs with all their cases, because they show what the job is for, or because the docs say so."""
_LINE = re.compile(r"([0-9.]+)s (?:call|setup|teardown) +(\S+::[^\[\s@]+)(.*)$")
"""xdist adds the group of a test after an @."""


def function_of(item: pytest.Item) -> str:
    """Return the test of an item, without its parameters."""
    return item.nodeid.partition("[")[0].partition("@")[0]


def thorough(report: str) -> list[str]:
    """Return the list for the durations that pytest has reported."""
    times: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in report.splitlines():
        if found := _LINE.match(line.strip()):
            times[found[2]][found[3] or ""] += float(found[1])
    left_out = {
        function: sum(cases.values()) - (next(iter(cases.values())) if len(cases) > 1 else 0.0)
        for function, cases in times.items()
    }
    rest = sum(sum(cases.values()) for cases in times.values())
    chosen = []
    for function in sorted(left_out, key=left_out.__getitem__, reverse=True):
        if rest <= BUDGET_S:
            break
        if function in MAIN_PATHS:
            continue
        chosen.append(function)
        rest -= left_out[function]
    return sorted(chosen)


if __name__ == "__main__":
    LIST.write_text(
        "".join(f"{each}\n" for each in thorough(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8"
    )
