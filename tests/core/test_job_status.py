"""The status for viewers is plain JSON, and names the holder of each rank."""

import json
import os

import pytest
from golden import Run, shown

from deadpool_run.vault.status_page import BUSY, Phase, StatusPage, create_status_page
from deadpool_run.view import job_status


def run(*commands):
    told = Run()
    for command in commands:
        told.command(command)
    return shown(told.state)


START = ("new world_size=2 spares=1", "start", "ready w0..w2")
PROTECTED = (*START, "setup w0 w1", "transcript w0 w1")
REPAIRED = (
    *(*PROTECTED, "kill w1 held=4,5", "aborted w0 5 held=4,5", "rehearsed w2", "restored w0 w2"),
    *("attached w0 w2", "stepped w0 w2"),
)


def test_it_is_json_at_any_time():
    for count in range(len(REPAIRED)):
        json.dumps(run(*REPAIRED[: count + 1]))


def test_an_unmanaged_script_is_shown_as_running():
    assert [rank["phase"] for rank in run(*START)["ranks"]] == ["running", "running"]
    assert [rank["phase"] for rank in run(*START, "init w0")["ranks"]] == ["setting up", "setting up"]


def test_a_world_whose_protection_is_overdue_says_why():
    assert run(*START)["unprotected_reason"] == run(*START, "tick 59s")["unprotected_reason"] == ""
    assert "has not called deadpool_run.init()" in run(*START, "tick 60s")["unprotected_reason"]
    assert "no rank has entered job.steps()" in run(*START, "init w0", "tick 60s")["unprotected_reason"]
    assert "first two steps" in run(*START, "setup w0 w1", "tick 60s")["unprotected_reason"]
    assert run(*START, "tick 60s", "setup w0 w1", "transcript w0 w1")["unprotected_reason"] == ""


def test_a_loop_outside_the_librarys_is_told_at_once():
    text = run(*START, "init w0 w1", "bypass w1")["unprotected_reason"]
    assert text.startswith("the script trains outside job.steps()")
    assert "for step in job.steps(N):" in text


def test_a_vacant_and_a_finished_rank_have_no_worker():
    ranks = run(*PROTECTED, "kill w2", "kill w1 held=4,5")["ranks"]
    vacant = {"rank": 1, "worker": None, "pid": None, "phase": "vacant", "node": "node", "local_rank": 1}
    assert vacant.items() <= ranks[1].items()
    assert run(*PROTECTED, "exit w0 code=0")["ranks"][0]["phase"] == "done"


@pytest.fixture
def status_page():
    fd = create_status_page(2)
    made = StatusPage(fd, 2)
    yield made
    made.close()
    os.close(fd)


def test_a_rank_is_shown_with_what_it_wrote_on_the_status_page(status_page):
    told = Run()
    for command in PROTECTED:
        told.command(command)
    one, two = status_page.rank_entries
    one.phase, one.completed, one.issued, one.waited = Phase.STEP, 8, 5, 4
    one.step_ns, one.capture_ns, one.growing = 2_500_000, 500_000, -64
    two.phase, two.completed, two.issued, two.waited, two.growing = Phase.BETWEEN, 9, 5, 5, 64
    one.cpu_millis, one.memory, one.gpu_percent, one.gpu_memory = 1875, 2 << 30, 0, 3 << 30
    for slot, (first, second) in enumerate([(8, BUSY), (7, 9)]):
        one.set_slot(slot, first)
        two.set_slot(slot, second)
    first, second = job_status.ranks(told.state, status_page.words(), now=0.0)
    assert (first["worker"], first["activity"], first["waiting"], first["step"]) == (0, "step", True, 8)
    assert (first["step_ms"], first["capture_ms"]) == (2.5, 0.5)
    assert (first["snapshots"], first["no_memory_bytes"]) == ([7, 8], 64)
    assert (first["cpu_cores"], first["memory_bytes"]) == (1.875, 2 << 30)
    assert (first["gpu_percent"], first["gpu_memory_bytes"]) == (0, 3 << 30)
    assert {second[name] for name in ("cpu_cores", "memory_bytes", "gpu_percent", "gpu_memory_bytes")} == {None}
    assert (second["activity"], second["step"]) == ("between", 9)
    assert (second["waiting"], second["snapshots"], second["no_memory_bytes"], second["slowed"]) == (False, [9], 0, 1.0)


def test_the_resume_version_is_shown_while_it_matters():
    assert run(*REPAIRED[:7])["resume"] == 5
    after = run(*REPAIRED)
    assert after["resume"] is None
    assert [loss["replacement"] for loss in after["incidents"][0]["losses"]] == [2]
