"""The doctor names missing conditions of a run, and checks that a killed rank is replaced."""

import os
import socket

import pytest
from test_cli_app import deadpool, ours

from deadpool_run.cli.doctor import gpu
from deadpool_run.cli.doctor.findings import Grade, findings
from deadpool_run.cli.doctor.swap import swap


def graded(environment):
    return {found.name: (found.grade, found.text) for found in findings(environment)}


def test_a_machine_that_runs_these_tests_has_nothing_bad(tmp_path):
    done = deadpool("doctor", "--no-swap", env=ours(tmp_path))
    assert done.returncode == 0, done.stdout
    names = [line[6:22].strip() for line in done.stdout.splitlines()]
    assert names[:3] == ["versions", "kernel", "machine"]
    assert {"open files", "processes", "memory", "run directories", "token", "port", "own name"} <= set(names)
    assert "swap" not in names
    assert not (tmp_path / "state").exists()


def test_what_is_wrong_is_named_with_what_to_do(tmp_path):
    environment = ours(tmp_path, DEADPOOL_SPAERS="1")
    folder = tmp_path / "state" / "deadpool-run"
    folder.mkdir(parents=True)
    (folder / "token").write_text("0123456789abcdef")
    (folder / "token").chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("", 29400))
        found = graded(environment)
    assert found["token"][0] is Grade.BAD
    assert "chmod 600" in found["token"][1]
    assert (found["port"][0], "29400" in found["port"][1]) == (Grade.NOTE, True)
    assert found["variables"] == (
        Grade.NOTE,
        "DEADPOOL_SPAERS has no effect: no option reads it: did you mean DEADPOOL_SPARES?",
    )
    assert deadpool("doctor", "--no-swap", env=environment).returncode == 1
    assert graded(environment | {"DEADPOOL_TOKEN": "x" * 16})["token"] == (Grade.OK, "DEADPOOL_TOKEN is set")


def test_a_swap_that_does_not_end_is_bad():
    found = swap(os.environ, 0.05)
    assert found.grade is Grade.BAD
    assert found.text.startswith("it did not end within 0.05 s; ")


@pytest.mark.slow
def test_a_killed_rank_is_replaced():
    found = swap(os.environ, 120)
    assert found.grade is Grade.OK, found.text
    assert "the weights are exact" in found.text


def test_without_a_gpu_nothing_is_measured_and_the_exit_code_says_so(tmp_path):
    done = deadpool("doctor", "--gpu", env=ours(tmp_path, CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 3, done.stdout
    assert "no GPU is visible" in done.stdout.splitlines()[-1]
    assert "one rank is measured" in gpu.too_few(1).text
    assert gpu.too_few(2) is None


def test_a_measurement_that_does_not_end_is_bad():
    measured = next(gpu.measure(os.environ, 2, 0.05))
    assert (measured.finding.grade, measured.row) == (Grade.BAD, "")
    assert "'torchrun' did not end within 0.05 s" in measured.finding.text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_and_a_killed_rank_are_measured(ranks):
    """Without a GPU the same training runs on CPUs."""
    for measured in gpu.measure(os.environ, ranks, 200):
        assert measured.finding.grade is Grade.OK, measured.finding.text
        cells = measured.row.strip("| ").split(" | ")
        assert len(cells) == len(gpu.COLUMNS)
        assert cells[-1] == "exact"
