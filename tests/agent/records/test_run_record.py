"""The record of a run never stops the agent: a disk that fails or stalls costs the record."""

import json
import os
import threading

import pytest

from deadpool_run.agent.records import run_record
from deadpool_run.agent.records.run_record import RECORD_NAME, RunRecord, outcome
from deadpool_run.agent.spec import LaunchSpec, Mode, Target
from deadpool_run.core.settings import Settings


@pytest.fixture
def spec(tmp_path):
    return LaunchSpec(
        settings=Settings(world_size=1),
        target=Target(Mode.EXEC, ("/bin/true",)),
        nproc_per_node=1,
        run_id="job",
        run_dir=tmp_path / "run",
    )


def test_the_end_is_there_when_it_was_recorded(spec):
    spec.run_dir.mkdir()
    RunRecord(spec, None).end(3, "why")
    assert outcome(spec.run_dir) == 3
    record = json.loads((spec.run_dir / RECORD_NAME).read_text())
    assert (record["run_id"], record["reason"]) == ("job", "why")


def test_a_record_that_cannot_be_written_is_reported_once(spec, capfd):
    RunRecord(spec, None).end(0, "")
    assert capfd.readouterr().err.count("cannot write this run's record") == 1


def test_a_disk_that_stalls_delays_the_end_for_a_bounded_time(spec, capfd, monkeypatch):
    """A FIFO without a reader stalls the thread."""
    monkeypatch.setattr(run_record, "_GRACE_S", 0.2)
    spec.run_dir.mkdir()
    fifo = spec.run_dir / "fifo"
    os.mkfifo(fifo)
    record = RunRecord(spec, None)
    record._sink.put(lambda: fifo.write_bytes(b""))
    record.end(0, "")
    assert "its disk did not answer within 0.2 s" in capfd.readouterr().err
    fifo.read_bytes()
    for thread in threading.enumerate():
        if thread.name == "deadpool-record":
            thread.join()
    assert outcome(spec.run_dir) == 0
