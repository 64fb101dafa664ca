"""The report of a run: its history from the files of a run directory, the page and the trace."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from kit.trace_events import check_event, check_nested, check_trace
from msgspec.structs import replace
from test_cli_app import deadpool, ours

from deadpool_run.agent.records.user_log import Cost
from deadpool_run.cli.report import charts
from deadpool_run.cli.report.charts import MOST_ROWS, shown_ranks
from deadpool_run.cli.report.history import RepairRecord, read_history, thinned
from deadpool_run.cli.report.page import page
from deadpool_run.cli.report.svg import ticks
from deadpool_run.cli.report.trace import trace
from deadpool_run.cli.runs.find import run_at
from deadpool_run.coordinator.journal import FORMAT, Entry, Header
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.coordinator import new_state
from deadpool_run.core.injection import KillHow
from deadpool_run.core.settings import Settings
from deadpool_run.wire.typed import to_json

CAUSE = "raised <script>alert(1)</script> \x1b[31m"
LOSS = do.Loss(1, 1, CAUSE, injected=True, replacement=2, from_spare=True)
INCIDENT = do.Incident(2, (LOSS,), 30, 3, 0.05, 0.1, 0.01, 0.4, 0.45, 0.5, 0.6)
PLACE = ev.Place("n7", "127.0.0.1", 0)
STORY = (
    (100.0, ev.JobSubmitted("n7", PLACE), (do.StartWorker(0, "n7"), do.StartWorker(1, "n7"), do.StartWorker(2, "n7"))),
    (101.0, ev.WorkerStarted(0, 4710), ()),
    (101.0, ev.WorkerStarted(1, 4711), ()),
    (101.0, ev.WorkerStarted(2, 4712), ()),
    (102.0, ev.WorkerReady(1), (do.AssignRank(0, 0, 1, False, 0), do.AssignRank(1, 1, 1, False, 1))),
    (104.0, ev.SetupCompleted(0), ()),
    (104.5, ev.SetupCompleted(1), ()),
    (109.95, ev.KillRequested(1, KillHow.EXIT), ()),
    (110.0, ev.WorkerExited(1, 1, None), (do.AbortStep(0, 2), do.AssignRank(2, 1, 2, True, 1))),
    (110.6, ev.FirstStepCompleted(2, 2), (do.ReportIncident(INCIDENT),)),
    (119.0, ev.WorkerExited(0, 0, None), ()),
    (120.0, ev.WorkerExited(2, 0, None), (do.StopJob(0, "every rank finished"),)),
)
SAMPLES = [
    {
        "now": 105.0 + at,
        "step": 6 * at,
        "step_s": 0.15,
        "capture_s": 0.01,
        "committed": max(0, 6 * at - 2),
        "bytes": 5 << 20,
    }
    for at in range(15)
]


def journal(story, state=None):
    head = Header(FORMAT, Settings(world_size=2, spares=1), state)
    return b"".join(to_json(each) + b"\n" for each in (head, *(Entry(*entry) for entry in story)))


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "state" / "deadpool-run" / "night"
    path.mkdir(parents=True)
    record = {
        "run_id": "night",
        "pid": 1,
        "host": "n7",
        "command": ["train.py"],
        "world_size": 2,
        "spares": 1,
        "nodes": 1,
        "started": "2026-02-03T04:05:06+00:00",
        "ended": "2026-02-03T04:05:26+00:00",
        "exit_code": 0,
        "reason": "every rank finished",
        "chaos": {"plan": "kill rank 1", "seed": 7},
    }
    (path / "run.json").write_text(json.dumps(record))
    (path / "journal.jsonl").write_bytes(journal(STORY))
    (path / "samples.jsonl").write_bytes(b"".join(to_json(each) + b"\n" for each in SAMPLES))
    return path


def test_the_history_says_who_had_each_rank_and_what_repairs_cost(run):
    history = read_history(run_at(run))
    assert history.duration == 20
    assert [(each.rank, each.worker, each.began, each.ended, each.end) for each in history.tenures] == [
        (0, 0, 2, 19, "exit code 0"),
        (1, 1, 2, 10, "exit code 1"),
        (1, 2, 10, 20, "exit code 0"),
    ]
    assert [(each.pid, each.node, each.set_up) for each in history.tenures[:2]] == [(4710, "n7", 4), (4711, "n7", 4.5)]
    (repair,) = history.repairs
    assert (repair.began, repair.ended) == pytest.approx((10, 10.6))
    assert sum(seconds for _, seconds in repair.parts()) == pytest.approx(repair.lost_s) == pytest.approx(0.65)
    assert [(moment.kind, moment.rank) for moment in history.moments] == [("kill", 1)]
    expected = Cost()
    expected.add(INCIDENT, 0.15)
    assert history.cost() == expected


def test_lines_that_were_cut_or_dropped_are_left_out_and_counted(run):
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'{"dropped":3,"state":null}\n{"now":121.0,"ev')
    with (run / "samples.jsonl").open("ab") as file:
        file.write(b'{"now":12')
    history = read_history(run_at(run))
    assert (history.missing, len(history.samples)) == (3, len(SAMPLES))
    assert "3 entries of the journal cannot be read" in page(history)


def test_a_later_leader_knows_who_has_the_ranks(run):
    state = new_state(Settings(world_size=2, spares=1))
    state.seats[0].owner, state.seats[1].owner = 0, 2
    (run / "journal.jsonl").unlink()
    (run / "node-n8").mkdir()
    (run / "node-n8" / "journal.jsonl").write_bytes(
        journal(((200.0, ev.CoordinatorMoved(2, "n8"), ()), *STORY[-2:]), state)
    )
    history = read_history(run_at(run))
    assert [(each.rank, each.worker) for each in history.tenures] == [(0, 0), (1, 2)]
    assert [moment.kind for moment in history.moments] == ["leader"]


@pytest.fixture
def drained(run):
    moved = replace(LOSS, cause="was drained", injected=False, planned=True)
    incident = replace(INCIDENT, losses=(moved,), steps_repeated=0, detected_s=None)
    story = [*STORY[:7], (110.0, ev.DrainRequested(1), (do.AbortStep(0, 2), do.AssignRank(2, 1, 2, True, 1)))]
    story += [(110.6, ev.FirstStepCompleted(2, 2), (do.ReportIncident(incident),)), *STORY[-2:]]
    (run / "journal.jsonl").write_bytes(journal(story))
    return run


def test_a_planned_move_is_no_loss_in_the_report(drained):
    history = read_history(run_at(drained))
    text = page(history)
    drawn = [ET.fromstring(each) for each in re.findall(r'<svg [^>]*role="img".*?</svg>', text, re.DOTALL)]
    classes = {each.get("class") for chart in drawn for each in chart.iter()}
    assert {"loss", "lost", "p4"}.isdisjoint(classes)
    assert {"move", "moved"} <= classes
    titles = [each.text for chart in drawn for each in chart.iter("title")]
    assert "0:10: rank 1 moves to worker 2: drain, 0.60 s" in titles
    assert "0:10: waits 600 ms for a move" in titles
    assert not [title for title in titles if "repair" in title]
    assert "<b>0</b><span>repairs</span></div><div><b>1</b><span>planned moves</span>" in text
    assert "No rank was lost." in text
    assert "<td>moved by drain</td>" in text
    assert "move of rank 1" in {event["name"] for event in trace(history)["traceEvents"]}


def test_losses_and_moves_of_a_run_are_told_apart(run, drained):
    with (run / "journal.jsonl").open("ab") as file:
        file.write(journal(STORY[7:10]).partition(b"\n")[2])
    text = page(read_history(run_at(run)))
    drawn = [ET.fromstring(each) for each in re.findall(r'<svg [^>]*role="img".*?</svg>', text, re.DOTALL)]
    classes = {each.get("class") for chart in drawn for each in chart.iter()}
    assert {"loss", "lost", "move", "moved", "p4"} <= classes
    assert "No rank was lost." not in text


class Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_loads_nothing_and_quotes_what_scripts_raise(run):
    text = page(read_history(run_at(run)))
    parser = Parser()
    parser.feed(text)
    assert not parser.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not parser.attributes & {"src", "href", "action", "onclick", "onload"}
    assert "default-src 'none'" in text
    assert "://" not in text
    assert "url(" not in text
    assert "raised &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\x1b" not in text


def test_the_page_has_its_charts_and_numbers(run):
    text = page(read_history(run_at(run)))
    drawn = [ET.fromstring(each) for each in re.findall(r'<svg [^>]*role="img".*?</svg>', text, re.DOTALL)]
    labels = [each.get("aria-label") for each in drawn]
    assert len(labels) == len(set(labels)) == 7
    classes = [each.get("class") for chart in drawn for each in chart.iter()]
    assert {"run", "setup", "wait", "lost", "kill", "loss", "p1", "p4", "p7"} <= set(classes)
    for shown in ("20s", "84", "150 ms", "seed 7: 1 fault", "5.24 MB", "spare worker 2", "95.25 %"):
        assert shown in text, shown


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"spares": 1}, "2 ranks, 1 spare on n7;"),
        ({"spares": 0}, "2 ranks, no spares on n7;"),
        ({"nodes": 2, "spares": 0, "spare_nodes": 1}, "2 ranks, 1 spare machine on 3 machines, led by n7;"),
        ({"nodes": 2, "spares": 2, "spare_nodes": 1}, "2 ranks, 2 spares, 1 spare machine on 3 machines, led by n7;"),
    ],
)
def test_the_page_names_spares_and_spare_machines(run, asked, shown):
    history = read_history(run_at(run))
    history.record = {**history.record, **asked}
    assert shown in page(history)


def test_a_run_without_samples_or_losses_has_a_page_too(run):
    (run / "samples.jsonl").unlink()
    (run / "journal.jsonl").write_bytes(journal(STORY[:7]))
    text = page(read_history(run_at(run)))
    assert "No rank was lost." in text
    assert "Step times" not in text


def test_of_many_ranks_those_that_were_lost_have_a_row(run):
    history = read_history(run_at(run))
    history.record = {**history.record, "world_size": 512}
    (repair,) = history.repairs
    incident = replace(INCIDENT, losses=(replace(LOSS, rank=500),))
    history.repairs = [RepairRecord(repair.began, repair.ended, incident)]
    rows = shown_ranks(history)
    assert len(rows) == MOST_ROWS
    assert 500 in rows
    assert "448 more ranks" in page(history)


def test_the_trace_is_one_that_viewers_read(run):
    events = check_trace(json.dumps(trace(read_history(run_at(run)))))
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2}
    assert all(event["ts"] <= 20e6 for event in events if event["ph"] != "M")


@pytest.mark.parametrize(
    "defect",
    [
        {"ts": None},
        {"dur": -1},
        {"dur": "5"},
        {"pid": "rank 1"},
        {"tid": None},
        {"ph": "Z"},
        {"name": ""},
        {"args": None},
    ],
)
def test_a_defect_of_a_trace_is_seen(defect):
    event = {"ph": "X", "pid": 1, "tid": 0, "ts": 1.0, "dur": 2.0, "name": "worker 1", "args": {}}
    check_event(event)
    with pytest.raises(AssertionError):
        check_event({**event, **defect})
    with pytest.raises(AssertionError):
        check_nested([(0, 10), (5, 15)])


def test_a_hang_neither_counts_as_steps_nor_hides_other_repairs(run):
    stuck = [{**SAMPLES[-1], "now": 130.0 + at, "step_s": 9.0} for at in range(50)]
    (run / "samples.jsonl").write_bytes(b"".join(to_json(each) + b"\n" for each in SAMPLES + stuck))
    history = read_history(run_at(run))
    assert {sample.step_s for sample in history.stepping()} == {0.15}
    (repair,) = history.repairs
    hang = RepairRecord(12.0, 12.6, replace(INCIDENT, detected_s=100.0))
    history.repairs = [repair, repair, repair, hang]
    drawn = ET.fromstring(charts.repairs(history))
    heights = {float(each.get("height")) for each in drawn.iter("rect") if each.get("class") == "p4"}
    assert max(heights) > 10
    assert "100.6 s" in [each.text for each in drawn.iter("text")]


def test_long_stretches_keep_their_slowest_step(run):
    samples = read_history(run_at(run)).samples
    assert thinned(samples, 100) == samples
    assert len(thinned(samples, 5)) == 5


@pytest.mark.parametrize(
    ("most", "expected"), [(0, [0, 1]), (0.7, [0, 0.2, 0.4, 0.6, 0.8]), (400, [0, 100, 200, 300, 400])]
)
def test_axes_have_round_numbers(most, expected):
    assert ticks(most) == pytest.approx(expected)


def test_the_command_writes_both_files_and_refuses_what_is_not_there(run, tmp_path):
    made, traced = tmp_path / "a.html", tmp_path / "a.json"
    done = deadpool("report", "night", "-o", str(made), "--trace", str(traced), env=ours(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{made}\n{traced}\n"), done.stderr
    assert json.loads(traced.read_text())["otherData"]["run_id"] == "night"
    assert deadpool("report", str(run), "-o", str(made), env=ours(tmp_path)).returncode == 0
    for words, code, why in (
        (("nosuch",), 4, "no run 'nosuch' below"),
        (("night", "--run-id", "night"), 2, "RUN excludes"),
        (("night", "-o", "/nosuch/a.html"), 2, "/nosuch/a.html: No such file or directory"),
    ):
        done = deadpool("report", *words, env=ours(tmp_path))
        assert (done.returncode, why in done.stderr) == (code, True), done.stderr
