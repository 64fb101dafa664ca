"""The record of a run never stops the agent: a disk that fails or stalls costs the record."""

import json
import os
import stat
import threading
from types import SimpleNamespace

import pytest

from deadpool_run.agent.agent import _Agent
from deadpool_run.agent.records import run_record
from deadpool_run.agent.records.run_record import RECORD_NAME, RunRecord, make_run_dir, outcome
from deadpool_run.agent.spec import Cluster, LaunchSpec, Mode, Target
from deadpool_run.core.settings import Settings
from deadpool_run.errors import ProtocolError
from deadpool_run.wire.peers import Joined


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


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_directory_that_exists_keeps_its_mode(tmp_path, mode):
    """It may be the folder of the user's project."""
    tmp_path.chmod(mode)
    make_run_dir(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode


def test_a_directory_that_is_made_is_private(tmp_path):
    make_run_dir(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


CLUSTER = Cluster(endpoints=(), token=b"token", node_name="n")


def spec_of(spec, node, run_name):
    joined = Joined(node, "id", run_name, spec.settings, None)
    return _Agent._spec_of(SimpleNamespace(_spec=spec), CLUSTER, joined)


@pytest.mark.parametrize("name", ["..", ".", "", "/tmp", "a/b", "../a", "a\0b"])
def test_a_leader_cannot_name_a_directory_elsewhere(spec, name):
    with pytest.raises(ProtocolError, match="is no name of a directory"):
        spec_of(spec, "n", name)


@pytest.mark.parametrize("node", ["/../a", "a/../../../b"])
def test_a_node_id_cannot_lead_elsewhere(spec, node):
    with pytest.raises(ProtocolError, match="is no name of a directory"):
        spec_of(spec, node, "job")


def test_a_node_has_its_directory_in_that_of_the_run(spec):
    assert spec_of(spec, "n~2", "job 1-r2").run_dir == spec.run_dir.parent / "job 1-r2" / "node-n~2"
