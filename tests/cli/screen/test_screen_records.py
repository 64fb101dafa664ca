"""The run's records in the live status: the last events in words, and the pace. A disk that stalls costs only them."""

import json
import os
import re
import sys
from datetime import UTC, datetime, timedelta

import pytest
from cli.screen.test_screen_parts import NOW, lines, status
from cli.test_cli_client import deadpool, serving
from kit.terminal import Terminal
from msgspec.structs import replace

from deadpool_run.cli.runs.events import Event
from deadpool_run.cli.screen.records import EVENTS_KEPT, RunRecords
from deadpool_run.cli.screen.state import ScreenState
from deadpool_run.coordinator.journal import FORMAT, Entry, Header
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.wire.typed import to_json, to_plain

WAIT_S = 30
NIGHT = {"run": {"run_id": "night"}}
STARTED = datetime(2026, 2, 3, 3, 0, 0, tzinfo=UTC)
LOSS = do.Loss(1, 1, "was killed by SIGKILL", injected=False, replacement=2, from_spare=True)
INCIDENT = do.Incident(2, (LOSS,), 30, 1, None, 0.1, 0.01, 0.4, 0.45, 0.5, 0.6)
RECOVERED = "recovered rank 1 on spare worker 2 in 0.60 s; resumed at step 30, 1 step repeated"
FIRST = (100.0, ev.JobSubmitted("n7", ev.Place("n7", "127.0.0.1", 0)), ())
REPAIR = (
    (160.0, ev.WorkerExited(1, None, 9), (do.Announce("rank 1 (worker 1) was killed by SIGKILL", "a spare takes it"),)),
    (160.0, ev.TimeAdvanced(), (do.Announce("worker 2 takes rank 1", "", detail=True), do.ResumeFrom(0, 2, 30, None))),
    (160.6, ev.FirstStepCompleted(2, 2), (do.ReportIncident(INCIDENT),)),
)


def written(entries):
    return b"".join(to_json(Entry(*entry)) + b"\n" for entry in entries)


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "night"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"run_id": "night", "started": STARTED.isoformat(), "term": 3}))
    head = to_json(Header(FORMAT, Settings(world_size=2, spares=1), None)) + b"\n"
    (path / "journal.jsonl").write_bytes(head + written((FIRST, *REPAIR)))
    return path


def recorded(run_dir, shown=None):
    with RunRecords(run_dir) as records:
        records.wait(WAIT_S)
        return records.of(NIGHT | (shown or {}))


def test_the_events_are_those_of_the_launchers_log_with_their_times(run_dir):
    first, second = recorded(run_dir).events
    assert first == Event(STARTED + timedelta(seconds=60), "rank 1 (worker 1) was killed by SIGKILL: a spare takes it")
    assert second == Event(STARTED + timedelta(seconds=60.6), RECOVERED)


def test_the_next_part_of_a_journal_continues_the_events_and_the_clock(run_dir):
    with RunRecords(run_dir) as records:
        records.wait(WAIT_S)
        with (run_dir / "journal.jsonl").open("ab") as file:
            file.write(written([(170.0, ev.NodeJoined("n8", ev.Place("n8", "127.0.0.1", 0)), ())]))
        head = to_json(Header(FORMAT, Settings(world_size=2, spares=1), None, began=100.0)) + b"\n"
        joined = (190.0, ev.NodeJoined("n9", ev.Place("n9", "127.0.0.1", 0)), ())
        part = run_dir / "journal-2.jsonl"
        part.write_bytes(head + written([joined]))
        os.utime(part, (2e9, 2e9))
        records._read()  # as its thread does each second
        events = records.of(NIGHT).events
    assert [event.text for event in events[-3:]] == [RECOVERED, "node n8 joined", "node n9 joined"]
    assert events[-1].at == STARTED + timedelta(seconds=90)


def test_of_a_long_journal_the_end_is_read_and_then_what_is_added(run_dir):
    commits = written((200.0 + at, ev.SnapshotCommitted(at, 2), ()) for at in range(20_000))
    joined = written(
        (30_000.0 + at, ev.NodeJoined(f"n{at}", ev.Place(f"n{at}", "127.0.0.1", 0)), ()) for at in range(9)
    )
    journal = run_dir / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(commits + joined[:-20])
    with RunRecords(run_dir) as records:
        records.wait(WAIT_S)
        before = records.of(NIGHT).events
        with journal.open("ab") as file:
            file.write(joined[-20:])
        records._read()  # as its thread does each second
        after = records.of(NIGHT).events
    assert [event.text for event in before] == [f"node n{at} joined" for at in range(8)]
    assert [event.text for event in after] == [f"node n{at} joined" for at in range(1, 9)]
    assert len(after) == EVENTS_KEPT
    assert after[-1].at == STARTED + timedelta(seconds=29_908)


def test_records_of_another_leader_are_not_shown(run_dir):
    assert recorded(run_dir, {"coordinator": {"node": "n7", "term": 3}}).events
    assert not recorded(run_dir, {"coordinator": {"node": "n8", "term": 4}}).events


def test_records_of_another_run_are_not_shown(run_dir):
    """Two runs of one machine may have directories that look like those of the nodes of one run."""
    assert not recorded(run_dir, {"run": {"run_id": "day"}}).events


def test_a_leader_whose_record_is_written_after_its_journal_is_found(run_dir):
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, "leader": False, "term": 0}))
    with RunRecords(run_dir) as records:
        records.wait(WAIT_S)
        leads = NIGHT | {"coordinator": {"node": "n7", "term": 3}}
        assert not records.of(leads).events
        (run_dir / "run.json").write_text(json.dumps(record))
        records._read()  # as its thread does each second
        assert records.of(leads).events


def test_a_follower_finds_the_records_on_a_shared_disk(run_dir):
    (run_dir / "node-n8").mkdir()
    assert recorded(run_dir / "node-n8", {"coordinator": {"node": "n7", "term": 3}}).events


def test_the_samples_have_the_pace(run_dir):
    assert recorded(run_dir).steps_per_s is None
    samples = [{"now": 100.0 + at, "step": 4 * at, "step_s": 9.0} for at in range(3000)]
    (run_dir / "samples.jsonl").write_bytes(b"".join(to_json(each) + b"\n" for each in samples) + b'{"now":')
    assert recorded(run_dir).steps_per_s == pytest.approx(4.0)
    old = [{"now": 100.0 + 900 * at, "step": 900 * at} for at in range(60)]  # a day later
    (run_dir / "samples.jsonl").write_bytes(b"".join(to_json(each) + b"\n" for each in old))
    assert recorded(run_dir).steps_per_s is None


def test_a_run_without_records_here(tmp_path):
    assert recorded(tmp_path / "nowhere").events == ()


def test_the_screen_shows_events_and_repairs_with_their_time_of_day():
    local = NOW.astimezone().strftime("%H:%M:")
    told = {**to_plain(INCIDENT), "ended": (NOW - timedelta(seconds=4)).isoformat()}
    state = ScreenState(status(incidents=[told]))
    assert f"{local}02  {RECOVERED}"[:79] + "…" in lines(state)
    state.events = [Event(NOW - timedelta(seconds=at), text) for at, text in ((5, "rank 1 died"), (4, RECOVERED))]
    state.events.append(Event(NOW - timedelta(days=2), "node n7 joined"))
    shown = [line for line in lines(state) if re.match(r"[0-9]{2}[:-][0-9]{2}[: ]", line)]
    assert [line[:8] for line in shown[:2]] == [f"{local}02", f"{local}01"]
    assert [line.split()[-1] for line in shown[1:]] == ["died", "joined"]
    assert shown[2].startswith("02-0"), "another day"
    assert len([line for line in lines(state) if re.match(r" *[0-9]+  n[0-9]", line)]) >= 14


def test_repairs_of_an_earlier_leader_have_no_time():
    state = ScreenState(status(incidents=[to_plain(replace(INCIDENT, epoch=1)), {"of": "another version"}]))
    assert f"-         {RECOVERED}"[:79] + "…" in lines(state)


@pytest.mark.parametrize("name", ["journal.jsonl", "samples.jsonl", "run.json"])
def test_a_disk_that_stalls_stalls_no_viewer(tmp_path, run_dir, name):
    stalled = tmp_path / "stalled"
    with serving(stalled) as live:
        live.shown = status(8)
        for path in run_dir.iterdir():
            path.rename(stalled / path.name)
        (stalled / name).unlink(missing_ok=True)
        os.mkfifo(stalled / name)
        terminal = Terminal(sys.executable, "-m", "deadpool_run", "status", "--run-dir", str(stalled))
        try:
            terminal.wait_for("of 8")
            terminal.type("?")
            terminal.wait_for("this help")
            terminal.type("qq")
            assert terminal.exit_code() == 0
        finally:
            terminal.close()
        assert "run night" in deadpool("status", "--run-dir", str(stalled)).stdout
