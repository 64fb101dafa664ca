"""The conformance suite that `doctor --gpu` runs on NCCL, here on the fake device."""

import os
import sys
from pathlib import Path

import pytest
from kit.device.defects import PLANTED

from deadpool_run.cli.doctor import gpu
from deadpool_run.cli.doctor.conformance import STATEMENTS, conform
from deadpool_run.cli.doctor.findings import Finding, Grade
from deadpool_run.worker.check.conformance import BEHAVIOURS

ON_FAKE = (sys.executable, str(Path(__file__).with_name("conform_on_fake.py")))


def test_each_behaviour_has_a_statement():
    assert list(BEHAVIOURS) == list(STATEMENTS)


@pytest.mark.timeout(240)
def test_every_behaviour_is_seen_on_a_device_that_behaves():
    found = list(conform(os.environ, 60, ON_FAKE))
    assert [(each.name, each.grade, each.text) for each in found] == [
        (name, Grade.OK, text) for name, text in STATEMENTS.items()
    ]


def test_a_behaviour_that_is_not_seen_is_bad_and_says_what_was_seen():
    environment = os.environ | {PLANTED: "records_works_only"}
    found = next(each for each in conform(environment, 60, ON_FAKE) if each.name == "recorded")
    assert found.grade is Grade.BAD
    assert found.text.startswith(
        f"not seen: {STATEMENTS['recorded']}\n    rank 0 ended with exit code 1; its last lines:"
    )
    assert "ConformanceError" in found.text


def test_without_a_library_for_gpus_nothing_is_seen():
    found = next(conform(os.environ | {"CUDA_VISIBLE_DEVICES": ""}, 60))
    assert found.grade is Grade.BAD
    assert "torch has no library for collectives on GPUs here" in found.text


def test_a_behaviour_that_takes_too_long_is_bad_and_its_processes_are_ended():
    found = next(conform(os.environ, 0.05, ON_FAKE))
    assert found.grade is Grade.BAD
    assert "rank 1 did not end within 0.05 s" in found.text


def test_the_report_counts_them():
    findings = [Finding(Grade.OK, "a", ""), Finding(Grade.BAD, "b", "")]
    assert gpu.report([], findings).startswith("behaviours seen: 1 of 2\n\n| GPUs |")
