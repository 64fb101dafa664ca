"""Runs that are led from another directory, or from another machine."""

import asyncio
import contextlib
import json
import socket

import pytest
from view.test_view_client import WAIT_S, serving, stale

from deadpool_run.agent.relay import Relay
from deadpool_run.cli.slurm_status import job_of, run_dir_of
from deadpool_run.coordinator.control import MAX_LINE_BYTES
from deadpool_run.errors import NoSuchRunError
from deadpool_run.view.client import connect
from deadpool_run.wire import peers


def test_the_agent_that_leads_a_run_is_found_from_the_runs_directory(tmp_path):
    base = tmp_path / "run"
    stale(base)
    with serving(base / "node-n2"), serving(base / "node-n3") as leader:
        leader.shown = {**leader.shown, "phase": "leading"}
        (base / "head.json").write_text(json.dumps({"run_dir": str(base / "node-n3")}))
        with connect(base, tmp_path) as run:
            assert run.ask({"do": "status"})["phase"] == "leading"


@pytest.mark.parametrize("pointer", ["", "{", '{"run_dir": 3}', '{"run_dir": "/nowhere"}'])
def test_any_agent_of_this_machine_will_do(tmp_path, pointer):
    base = tmp_path / "run"
    stale(base)
    (base / "head.json").write_text(pointer)
    with serving(base / "node-n2") as live:
        for where in (base, None):
            with connect(where, tmp_path) as run:
                assert run.ask({"do": "status"}) == live.shown


def test_a_run_without_any_live_agent_is_over(tmp_path):
    stale(tmp_path / "run")
    stale(tmp_path / "run" / "node-n2")
    with pytest.raises(NoSuchRunError, match="the run is over"):
        connect(tmp_path / "run", tmp_path)


# --- an agent that follows -----------------------------------------------------------------------------------------


async def asked(run_dir, ask, *requests):
    """Return what a relay answers to these requests."""
    relay = Relay(run_dir, lambda question: ask(relay, question))
    await relay.start()
    reader, writer = await asyncio.open_unix_connection(str(run_dir / "control.sock"), limit=MAX_LINE_BYTES)
    answers = []
    for request in requests:
        writer.write(json.dumps(request).encode() + b"\n")
        answers.append(json.loads(await asyncio.wait_for(reader.readline(), WAIT_S)))
    writer.close()
    await relay.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert not (run_dir / "control.sock").exists()
    return answers


def test_a_question_is_passed_on_and_its_own_answer_comes_back(tmp_path):
    def ask(relay, question):
        relay.answered(peers.Answer(question.number + 7, {"of": "another question"}))
        relay.answered(peers.Answer(question.number, {"you asked": question.request}))
        return True

    requests = ({"do": "status"}, {"do": "kill-rank", "rank": 1})
    assert asyncio.run(asked(tmp_path, ask, *requests)) == [{"you asked": request} for request in requests]


def test_while_nobody_leads_that_is_the_answer(tmp_path):
    (answer,) = asyncio.run(asked(tmp_path, lambda *_: False, {"do": "status"}))
    assert "nobody leads" in answer["error"]


# --- a run of a Slurm job, seen from a login node ------------------------------------------------------------------


def record(folder, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"ended": None, "slurm_job": "42", "host": "another", "started": "2026-01-01T00:00:00", **fields}
    (folder / "run.json").write_text(json.dumps(parts))


def test_the_newest_run_of_another_machine_is_looked_at_through_slurm(tmp_path):
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    runs = tmp_path / "deadpool-run"
    record(runs / "old")
    record(runs / "new", slurm_job="43", started="2026-01-02T00:00:00")
    record(runs / "over", slurm_job="44", started="2026-01-03T00:00:00", ended="2026-01-03T00:00:01")
    record(runs / "here", slurm_job="45", started="2026-01-04T00:00:00", host=socket.gethostname())
    record(runs / "none", slurm_job=None, started="2026-01-05T00:00:00")
    (runs / "torn").mkdir()
    (runs / "torn" / "run.json").write_text("{")
    assert job_of(None, environment) == "43"
    assert job_of(runs / "old", environment) == "42"
    assert job_of(runs / "here", environment) is None
    assert job_of(None, environment | {"SLURM_JOB_ID": "43"}) == "42", "a look from inside the job looks no further"
    assert run_dir_of("42", environment) == runs / "old"
    assert run_dir_of("46", environment) is None


def test_a_run_whose_first_node_is_dead_is_known_by_another_nodes_record(tmp_path):
    record(tmp_path / "run" / "node-n2", slurm_job="50")
    assert job_of(tmp_path / "run", {}) == "50"
