"""The launcher's lines about a run, as the console gets them."""

import os
from datetime import UTC, datetime
from unittest.mock import ANY

import pytest
from msgspec.structs import replace
from test_incident_line import INCIDENT

from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.records.user_log import Cost, UserLog
from deadpool_run.agent.spec import LaunchSpec, Mode, Streams, Target
from deadpool_run.core.effects import Announce, ReportIncident
from deadpool_run.core.settings import Settings
from deadpool_run.vault.status_page import StatusPage, create_status_page


@pytest.fixture
def page():
    fd = create_status_page(2)
    made = StatusPage(fd, 2)
    yield made
    made.close()
    os.close(fd)


@pytest.fixture
def log(tmp_path, page):
    def make(*, was_led=False, settings=None, **fields):
        spec = LaunchSpec(
            settings=settings or Settings(world_size=2, spares=1),
            target=Target(Mode.EXEC, ("/bin/true",)),
            nproc_per_node=(settings or Settings(world_size=2)).ranks_per_node,
            run_id="night",
            run_dir=tmp_path,
            **fields,
        )
        return UserLog(spec, Logs(spec), was_led=was_led)

    return make


def test_a_run_says_what_it_starts_and_where_its_files_are(log, tmp_path, capfd):
    log()
    assert capfd.readouterr().err == f"deadpool-run: run night: 2 ranks, 1 spare; records in {tmp_path}\n"
    log(settings=Settings(world_size=2, nodes=1, spares=0))
    assert "run night: 2 ranks, no spares; records in " in capfd.readouterr().err
    log(settings=Settings(world_size=4, nodes=2, spare_nodes=1))
    assert "4 ranks, 1 spare machine; waiting for 2 more machines; records in" in capfd.readouterr().err


@pytest.mark.parametrize("kept", [{"tee": {1: Streams.BOTH}}, {"redirects": {0: Streams.ERR, 1: Streams.NONE}}])
def test_a_run_has_logs_if_output_of_workers_goes_to_files(log, page, tmp_path, capfd, kept):
    log(**kept).ended(1, page, managed=True)
    start, end = capfd.readouterr().err.splitlines()
    assert f"; logs in {tmp_path}/logs/night_" in start
    assert f", logs in {tmp_path}/logs/night_" in end


def test_a_later_leader_does_not_repeat_the_first_lines(log, page, capfd):
    log(was_led=True).protected(page)
    assert capfd.readouterr().err == ""


def test_a_run_says_once_that_it_is_protected(log, page, capfd):
    lines = log()
    page.rank_entries[1].completed = 2
    lines.protected(page)
    page.rank_entries[1].completed = 3
    lines.protected(page)
    assert capfd.readouterr().err.splitlines()[1:] == [
        "deadpool-run: protected since step 2: a lost rank is replaced in place"
    ]


def test_a_repair_is_one_short_line_and_all_of_it_with_verbose(log, page, capfd):
    orders = (Announce("worker 4 takes rank 1", "a spare was ready", detail=True), ReportIncident(INCIDENT))
    short = log()
    for order in orders:
        short.report(order, page)
    assert capfd.readouterr().err.splitlines()[1:] == [
        "deadpool-run: recovered rank 1 (injected) on spare worker 4 in 0.24 s; resumed at step 57, 0 steps repeated"
    ]
    verbose = log(verbose=True)
    for order in orders:
        verbose.report(order, page)
    detail, incident = capfd.readouterr().err.splitlines()[1:]
    assert detail == "deadpool-run: worker 4 takes rank 1: a spare was ready"
    assert "detected 2 ms, promoted 1," in incident


def test_the_end_has_what_losses_cost(log, page, capfd):
    lines = log()
    page.rank_entries[0].completed = 40
    lines.report(ReportIncident(replace(INCIDENT, steps_repeated=1)), page)
    assert {**lines.summary(), "goodput": 0} == {
        "repairs": 1,
        "moves": 0,
        "steps_repeated": 1,
        "lost_s": pytest.approx(0.243),
        "goodput": 0,
    }
    lines.ended(0, page, managed=True)
    lines.ended(1, page, managed=True)
    fine, failed = capfd.readouterr().err.splitlines()[-2:]
    assert fine.startswith(
        "deadpool-run: run night finished after 0s; 40 steps, 1 repair, 1 step repeated, 0.2 s lost, "
    )
    assert " goodput " in fine
    assert failed.startswith("deadpool-run: run night ended with exit code 1 after 0s; 40 steps, ")
    assert ", records in " in failed


def test_the_end_of_a_script_without_init_says_what_spares_did_not_do(log, page, capfd):
    log().ended(0, page, managed=False)
    assert "the script did not call deadpool_run.init(), so its ranks were not protected" in capfd.readouterr().err
    log(settings=Settings(world_size=2)).ended(0, page, managed=False)
    assert capfd.readouterr().err.splitlines()[-1] == "deadpool-run: run night finished after 0s"


def test_repeated_steps_beyond_the_first_cost_their_time():
    cost = Cost()
    cost.add(replace(INCIDENT, steps_repeated=11, detected_s=None, first_step_s=1.0), 0.5)
    assert (cost.repairs, cost.steps_repeated, cost.lost_s) == (1, 11, 6.0)
    assert cost.goodput(60.0) == pytest.approx(0.9)
    assert cost.goodput(1.0) == 0.0


def test_a_planned_move_costs_its_time_and_is_no_repair():
    cost = Cost()
    planned = tuple(replace(loss, planned=True) for loss in INCIDENT.losses)
    cost.add(replace(INCIDENT, losses=planned, detected_s=None, first_step_s=1.0), 0.5)
    assert (cost.repairs, cost.moves, cost.steps_repeated, cost.lost_s) == (0, 1, 0, 1.0)


def test_viewers_get_the_time_of_day_of_the_last_repairs(log, page):
    lines, before = log(), datetime.now(UTC).replace(microsecond=0)
    for epoch in range(2, 10):
        lines.report(ReportIncident(replace(INCIDENT, epoch=epoch)), page)
    incidents = [{"epoch": epoch} for epoch in (1, 5, 9)]
    first, *later = lines.seen_by_viewers({"phase": "running", "incidents": incidents})["incidents"]
    assert first == {"epoch": 1, "ended": None}, "of an earlier leader"
    assert [each["epoch"] for each in later] == [5, 9]
    assert all(before <= datetime.fromisoformat(each["ended"]) <= datetime.now(UTC) for each in later)
    assert lines.seen_by_viewers({"incidents": []})["cost"] == {**lines.summary(), "goodput": ANY}


def test_the_end_names_planned_moves(log, page, capfd):
    lines = log()
    planned = tuple(replace(loss, planned=True) for loss in INCIDENT.losses)
    lines.report(ReportIncident(replace(INCIDENT, losses=planned)), page)
    lines.ended(0, page, managed=True)
    assert ", 1 planned move, 0 steps repeated, 0.2 s lost, goodput " in capfd.readouterr().err.splitlines()[-1]
