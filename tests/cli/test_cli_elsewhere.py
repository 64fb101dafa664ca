"""Runs that are led from another directory, or from another machine."""

import json

import pytest
from cli.test_cli_client import serving, stale

from deadpool_run.cli.runs.client import connect
from deadpool_run.coordinator.address import POINTER_NAME
from deadpool_run.errors import NoSuchRunError


def test_the_agent_that_leads_a_run_is_found_from_the_runs_directory(tmp_path):
    base = tmp_path / "run"
    stale(base)
    with serving(base / "node-n3") as leader, serving(base / "node-n2"):
        leader.shown = {**leader.shown, "phase": "leading"}
        (base / POINTER_NAME).write_text(json.dumps({"run_dir": str(base / "node-n3")}))
        with connect(base, tmp_path) as run:
            assert run.ask({"do": "status"})["phase"] == "leading"


@pytest.mark.parametrize("pointer", ["", "{", '{"run_dir": 3}', '{"run_dir": "/nowhere"}'])
def test_any_agent_of_this_machine_will_do(tmp_path, pointer):
    base = tmp_path / "run"
    stale(base)
    (base / POINTER_NAME).write_text(pointer)
    with serving(base / "node-n2") as live:
        for where in (base, None):
            with connect(where, tmp_path) as run:
                assert run.ask({"do": "status"}) == live.shown


def test_a_run_without_any_live_agent_is_over(tmp_path):
    stale(tmp_path / "run")
    stale(tmp_path / "run" / "node-n2")
    with pytest.raises(NoSuchRunError, match="the run has ended"):
        connect(tmp_path / "run", tmp_path)
