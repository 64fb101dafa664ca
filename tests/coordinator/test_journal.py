"""A journal tells its reader exactly what happened, and the same decisions follow from it."""

import errno
import json
import os
import stat
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.messages import register
from kit.replay import replay

from deadpool_run.coordinator import journal
from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.injection import KillHow
from deadpool_run.core.settings import Settings
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import typed

register()
SETTINGS = Settings(world_size=2, spares=1)
TIMELINE = [
    ev.JobSubmitted(),
    *(ev.WorkerStarted(w, 100 + w) for w in range(3)),
    *(ev.WorkerReady(w) for w in range(3)),
    *(ev.ScriptInitialized(w) for w in range(2)),
    *(ev.TranscriptCompleted(w) for w in range(2)),
    ev.KillRequested(1, KillHow.SIGKILL),
    ev.WorkerExited(1, None, 9, (4, 5)),
    ev.AbortCompleted(0, 2, 5, 5, (4, 5)),
    ev.ReplacementRehearsed(2, 2),
    *(ev.RankRestored(w, 2) for w in (0, 2)),
    *(ev.RankAttached(w, 2) for w in (0, 2)),
    *(ev.FirstStepCompleted(w, 2) for w in (0, 2)),
    ev.StopRequested(15),
]


def write(path):
    state, book = coordinator.new_state(SETTINGS), journal.Journal(path, SETTINGS)
    for number, event in enumerate(TIMELINE):
        effects = coordinator.step(SETTINGS, state, event, number / 7)
        book.append(number / 7, event, effects, state)
    book.close()
    return state


def test_a_journal_replays_to_the_same_state(tmp_path):
    state = write(tmp_path / "journal")
    replayed = replay(tmp_path / "journal")
    assert replayed.state == state
    assert replayed.settings == SETTINGS
    assert replayed.entries == len(TIMELINE)
    assert not replayed.divergences
    assert not replayed.torn


def test_only_its_owner_can_read_it_and_no_other_is_overwritten(tmp_path):
    write(tmp_path / "journal")
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        journal.Journal(tmp_path / "journal", SETTINGS)


def test_the_journal_of_an_earlier_term_is_kept_beside_that_of_the_last(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal.set_aside(path, 1)
    for term in (2, 4):
        path.write_text(f"before {term}")
        journal.set_aside(path, term)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {
        "journal-before-term-2.jsonl": "before 2",
        "journal-before-term-4.jsonl": "before 4",
    }


def test_a_long_journal_has_parts_of_which_the_first_and_the_newest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_PART_BYTES", 1000)
    monkeypatch.setattr(journal, "_NEWEST_PARTS", 3)
    path = tmp_path / "journal.jsonl"
    state, book = coordinator.new_state(SETTINGS), journal.Journal(path, SETTINGS)
    (tmp_path / "journal-before-term-7.jsonl").write_text("of another term")
    for number, event in enumerate(TIMELINE):
        written(book)
        now = 50 + number / 7
        book.append(now, event, coordinator.step(SETTINGS, state, event, now), state)
    book.close()
    assert book.dropped == 0
    names = {each.name for each in tmp_path.iterdir()} - {"journal-before-term-7.jsonl"}
    numbers = sorted(int(name[8:-6]) for name in names - {"journal.jsonl"})
    assert "journal.jsonl" in names
    assert len(numbers) == 3
    assert numbers[0] > 2, "no part was removed: the test shows nothing"
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    parts = [replay(journal.part_of(path, number)) for number in numbers]
    assert parts[-1].state == state
    assert not any(part.divergences for part in parts)
    assert sum(part.entries for part in parts) < len(TIMELINE)
    began = {name: json.loads((tmp_path / name).read_text().splitlines()[0])["began"] for name in names}
    assert began.pop("journal.jsonl") is None
    assert set(began.values()) == {50.0}


def test_another_decision_is_reported_with_its_line(tmp_path):
    path = tmp_path / "journal"
    write(path)
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"ResumeFrom"' in line)
    lines[number] = lines[number].replace('"version":5', '"version":4')
    path.write_text("\n".join(lines) + "\n")
    (divergence,) = replay(path).divergences
    assert divergence.line == number + 1
    assert do.ResumeFrom(0, 2, 4) in divergence.entry.effects
    assert do.ResumeFrom(0, 2, 5) in divergence.decided


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "journal"
    write(path)
    path.write_bytes(path.read_bytes()[:-5])
    replayed = replay(path)
    assert replayed.torn
    assert replayed.entries == len(TIMELINE) - 1


def test_a_line_that_is_no_entry_is_refused_by_its_number(tmp_path):
    path = tmp_path / "journal"
    write(path)
    path.write_text(path.read_text().replace('"pid":100', '"pid":"100"'))
    with pytest.raises(ProtocolError, match=f"{path}, line 3: .*pid"):
        replay(path)


def written(book):
    """Wait until all lines are written."""
    while not book._sink.is_empty:
        os.sched_yield()


def test_a_full_disk_ends_the_journal_and_not_the_job(tmp_path):
    faults, state = [], coordinator.new_state(SETTINGS)
    book = journal.Journal(tmp_path / "whole", SETTINGS, on_fault=faults.append)
    written(book)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, book._stream._fd)
    os.close(full)
    for number in range(3):
        book.append(float(number), ev.TimeAdvanced(), (), state)
        written(book)
    book.close()
    book.close()
    assert [fault.errno for fault in faults] == [errno.ENOSPC]
    assert (book.failure, book.dropped) == (faults[0], 3)
    assert replay(tmp_path / "whole").entries == 0


def test_a_disk_that_stalls_costs_lines_and_the_rest_replays(tmp_path, monkeypatch):
    """The disk is a full pipe that nobody reads for a while."""
    monkeypatch.setattr(journal, "_MAX_BYTES", 2000)
    path, state = tmp_path / "journal", coordinator.new_state(SETTINGS)
    book = journal.Journal(path, SETTINGS)
    written(book)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filler = os.write(writer, bytes(1 << 20))
    os.set_blocking(writer, True)
    os.dup2(writer, book._stream._fd)
    os.close(writer)

    def decide(number, event):
        book.append(number / 7, event, coordinator.step(SETTINGS, state, event, number / 7), state)

    for number, event in enumerate(TIMELINE[:-2]):
        decide(number, event)
    assert book.dropped > 0
    while filler:
        filler -= len(os.read(reader, filler))
    written(book)
    for number, event in enumerate(TIMELINE[-2:], len(TIMELINE) - 2):
        decide(number, event)
    book.close()
    with path.open("ab") as file, os.fdopen(reader, "rb") as pipe:
        file.write(pipe.read())
    replayed = replay(path)
    assert replayed.state == state
    assert (replayed.entries + replayed.dropped, replayed.dropped) == (len(TIMELINE), book.dropped)
    assert not replayed.divergences


@pytest.mark.parametrize(("share", "states"), [(0, len(TIMELINE)), (10**9, 2)])
def test_states_after_gaps_take_a_small_share_of_the_time(tmp_path, monkeypatch, share, states):
    """The state of a large world may fill the queue, and cause the next gap. The last line always ends one."""
    monkeypatch.setattr(journal, "_GAP_SHARE", share)
    path, state = tmp_path / "journal", coordinator.new_state(SETTINGS)
    book = journal.Journal(path, SETTINGS)
    for number, event in enumerate(TIMELINE):
        written(book)
        book._gap = book._gap or 1  # as if the queue were full
        book.append(number / 7, event, coordinator.step(SETTINGS, state, event, number / 7), state)
    book.close()
    assert sum(b'"dropped"' in line for line in path.read_bytes().splitlines()) == states


def test_a_later_leader_waits_for_no_disk(tmp_path):
    """A failure to create the journal is reported later. Here its folder does not exist."""
    folder = tmp_path / "gone"
    book, state = journal.Journal(folder / "journal", SETTINGS, coordinator.new_state(SETTINGS), term=2), None
    written(book)
    assert isinstance(book.failure, FileNotFoundError)
    book.append(0.0, ev.TimeAdvanced(), (), state)
    book.close()
    assert book.dropped == 2


def test_another_format_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "journal"
    path.write_text('{"format":1,"settings":{"world_size":2,"leaf":"x"},"state":null}\n{"now":0.0}\n')
    with pytest.raises(ProtocolError) as refused:
        replay(path)
    what, advice = str(refused.value).splitlines()
    assert what == f"{path} is a journal of format 1, and this version of deadpool-run reads format 4 only."
    assert advice == "Replay it with the version of deadpool-run that wrote it."


def test_the_first_line_names_the_format(tmp_path):
    write(tmp_path / "journal")
    with (tmp_path / "journal").open() as file:
        assert json.loads(file.readline())["format"] == journal.FORMAT == 4


def test_a_journal_that_begins_within_a_job_replays_from_there(tmp_path):
    state, path = write(tmp_path / "whole"), tmp_path / "journal"
    book = journal.Journal(path, SETTINGS, state)
    book.append(100.0, ev.TimeAdvanced(), coordinator.step(SETTINGS, state, ev.TimeAdvanced(), 100.0), state)
    book.close()
    replayed = replay(path)
    assert replayed.state == state
    assert not replayed.divergences


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", '{"format":4,"settings":{}}\n', "\x00\n"])
def test_what_is_no_journal_is_refused(tmp_path, text):
    (tmp_path / "journal").write_text(text)
    with pytest.raises(ProtocolError, match=str(tmp_path / "journal")):
        replay(tmp_path / "journal")


@pytest.mark.parametrize(
    "parts",
    [
        {"type": "Nonsense"},
        {"type": "WorkerReady"},
        {"type": "WorkerReady", "worker": "1"},
        {"type": "WorkerReady", "worker": 1, "more": 2},
        {"type": "KillRequested", "rank": 1, "how": "gently"},
    ],
)
def test_what_is_no_event_is_refused(parts):
    with pytest.raises(ProtocolError, match=parts["type"]):
        typed.Decoder(ev.Event, "an event").decode(json.dumps(parts).encode())


@pytest.mark.parametrize("kind", [*get_args(ev.Event), *get_args(do.Effect)], ids=lambda kind: kind.__name__)
def test_everything_comes_back_as_it_was(kind):
    decoder = typed.Decoder(kind, "an event or an effect")

    @settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(st.from_type(kind))
    def check(thing):
        assert decoder.decode(typed.to_json(thing)) == thing

    check()
