"""What the user is told of a decision."""

from pathlib import Path

import torch

from deadpool_run.agent.console import announcement, report_request


def test_a_reason_of_one_line_is_on_the_line():
    assert announcement("stopping the job", "rank 1 hung") == "stopping the job: rank 1 hung"
    assert announcement("finished", "") == "finished"


def test_a_reason_of_several_lines_is_below():
    assert announcement("stopping the job", "wrong\nwrite it so\n") == "stopping the job:\n  wrong\n  write it so"


def test_a_report_names_versions_and_the_journal():
    text = report_request(Path("/runs/1/journal.jsonl"))
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert "deadpool-run " in text
    assert text.endswith("journal: /runs/1/journal.jsonl")
