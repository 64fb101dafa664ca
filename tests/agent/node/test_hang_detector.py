"""Whether a silence is a hang, the rank to blame, and hangs during a repair."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from deadpool_run.agent.node.hang_detector import (
    LOOKS,
    HangDetector,
    RankSight,
    is_stopped,
    judge,
    sights_of,
)
from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.effects import KillWorker
from deadpool_run.core.settings import Settings
from deadpool_run.core.timers import UNWIND_S
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import Epoch, Rank, Version, WorkerId
from deadpool_run.vault.status_page import Phase, StatusPage, create_status_page

SETTINGS = Settings(world_size=3)


def see(rank, text):
    """Read `step:issued/waited`, with a phase behind it if that is not STEP."""
    where, _, phase = text.partition(" ")
    completed, _, counts = where.partition(":")
    issued, waited = map(int, counts.split("/"))
    return RankSight(Rank(rank), WorkerId(10 + rank), 1, Phase[phase or "STEP"], int(completed), issued, waited)


def world(*texts):
    return tuple(see(rank, text) for rank, text in enumerate(texts))


@pytest.mark.parametrize(
    ("texts", "stopped", "culprits"),
    [
        pytest.param(["5:9/8", "5:8/8", "5:9/8"], {}, [1], id="one computes, the others wait for it"),
        pytest.param(["5:8/8", "5:8/8", "5:9/8"], {}, [0, 1], id="two do not wait"),
        pytest.param(["5:9/8", "5:9/8", "5:9/8"], {2}, [2], id="stopped while it waits"),
        pytest.param(["5:8/8", "5:9/8", "5:9/8"], {2}, [2], id="stopped, so that the idle one may be innocent"),
        pytest.param(["5:8/8", "5:8/8", "5:8/8"], {0, 1, 2}, [0, 1, 2], id="all stopped"),
        pytest.param(["5:9/9 FINISHED", "4:8/8", "5:9/9 FINISHED"], {}, [1], id="finished ranks wait"),
        pytest.param(["5:9/9 FINISHED", "4:8/7", "4:8/7"], {}, [1, 2], id="finished ranks are ahead of all"),
        pytest.param(["5:9/9 FINISHED", "4:8/7", "4:8/7"], {0}, [0], id="a finished rank may be stopped"),
        pytest.param(["5:9/9 HELD", "5:9/9 HELD", "4:8/8"], {}, [2], id="ranks that are about to move wait"),
        pytest.param(["5:9/9 HELD", "5:9/9 HELD", "5:9/9 HELD"], {}, [], id="all are about to move"),
        pytest.param(["5:9/8", "4:8/7", "5:9/8"], {}, [1], id="all wait, one is a step behind"),
        pytest.param(["5:9/8", "5:9/8", "5:8/7"], {}, [2], id="all wait, one has issued less in the same step"),
        pytest.param(["6:2/1", "5:9/8", "6:2/1"], {}, [1], id="steps count before collectives"),
        pytest.param(["5:9/8", "5:9/8", "5:9/8"], {}, [], id="a deadlock of the script"),
        pytest.param(["5:9/9", "5:9/9", "5:8/8"], {}, [2], id="on NCCL no host waits: who is behind"),
        pytest.param(["5:9/9", "5:9/9", "5:9/9"], {}, [], id="on NCCL, all level"),
        pytest.param(["5:8/8"], {}, [], id="a world of one"),
        pytest.param(["5:8/8"], {0}, [0], id="a world of one, stopped"),
        pytest.param(
            ["5:9/8", "5:3/2", "5:8/8", "5:3/2"], {}, [2], id="a stage of a pipeline issues less than another"
        ),
    ],
)
def test_who_is_to_blame(texts, stopped, culprits):
    assert [sight.rank for sight in judge(world(*texts), stopped, 600).culprits] == culprits


def test_the_reason_says_what_was_seen_of_each_rank_those_to_blame_first():
    reason = judge(world("5:9/8 BETWEEN", "5:8/8", "6:9/9 FINISHED"), {}, 600).reason
    assert reason == (
        "no rank has made progress for 600 s: "
        "rank 1 waits for no collective (5 steps completed, phase step, 8 collectives issued, 8 completed); "
        "rank 0 waits in a collective (5 steps completed, phase between, 9 collectives issued, 8 completed); "
        "rank 2 has finished (6 steps completed, phase finished, 9 collectives issued, 9 completed)"
    )


def test_the_reason_of_a_large_world_is_one_that_can_be_read():
    reason = judge(world(*["5:9/8"] * 40, "5:8/8"), {}, 600).reason
    assert reason.count("rank ") == 9
    assert "rank 40 waits for no collective" in reason
    assert reason.endswith("; and 33 more")


def blind():
    """Return a detector that never looks."""
    return HangDetector(0, look=tuple, pid=lambda _: None, submit=lambda _: None, print_line=lambda _: None)


@pytest.mark.parametrize("change", ["5:9/7", "5:8/8", "6:9/8", "5:9/8 OPTIMIZER"])
def test_any_change_of_any_rank_is_progress(change):
    stillness = blind().stillness
    for _ in range(3):
        times = stillness(world("5:9/8", "5:9/8"))
    assert times == 2
    assert stillness(world("5:9/8", change)) == 0


def test_another_worker_or_epoch_is_progress_and_no_sight_ends_a_stillness():
    (one,) = world("5:9/8")
    for other in (
        RankSight(one.rank, WorkerId(11), one.epoch, one.phase, one.completed, one.issued, one.waited),
        RankSight(one.rank, one.worker, 2, one.phase, one.completed, one.issued, one.waited),
    ):
        stillness = blind().stillness
        assert [stillness((one,)), stillness((one,)), stillness((other,))] == [0, 1, 0]
    assert [stillness(()), stillness(())] == [0, 0]


# --- the shell --------------------------------------------------------------------------------------------------------


def watch(look, until, *, timeout_s=0.02):
    """Run a `HangDetector` on a real loop until it has told so much; return what it submitted and said."""
    told = []

    async def run():
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def hear(what):
            told.append(what)
            if len(told) == until and not over.done():
                over.set_result(None)

        health = HangDetector(timeout_s, look=look, pid=lambda _: None, submit=hear, print_line=hear)
        try:
            async with asyncio.timeout(30):
                await over
        finally:
            health.close()

    asyncio.run(run())
    return told


def test_a_hang_is_told_once_it_was_seen_for_the_whole_timeout_and_again_if_it_goes_on():
    looks = []

    def look():
        looks.append(len(looks))
        return world("5:9/8", "5:8/8")

    told = watch(look, 2)
    assert [event.worker for event in told] == [11, 11]
    assert len(looks) == 2 * (LOOKS + 1), "a first look, and as many more as a time-out has"


def watched(looks_until, stopped_pid=None, **options):
    """Return the hangs that are told of while a detector looks so many times at a world without progress."""
    told, looks = [], []

    async def run():
        over = asyncio.Event()

        def look():
            looks.append(len(looks))
            if len(looks) > looks_until:
                over.set()
                return ()
            return world("5:9/8", "5:8/8")

        detector = HangDetector(
            0.02,
            look=look,
            pid=lambda worker: stopped_pid if worker == 10 else None,
            submit=told.append,
            print_line=told.append,
            **options,
        )
        async with asyncio.timeout(30):
            await over.wait()
        detector.close()

    asyncio.run(run())
    return told


def test_a_slow_rank_has_as_many_times_longer():
    slow = {"slowed": lambda: {WorkerId(11): 3.0}}
    assert watched(3 * LOOKS, **slow) == []
    (hang,) = watched(3 * LOOKS + 1, **slow)
    assert (hang.worker, "made progress for 0.06 s" in hang.reason) == (11, True)
    assert len(watched(LOOKS + 1)) == 1


def test_the_end_of_a_slow_time_is_no_hang():
    times = iter([{WorkerId(11): 9.0}] * (2 * LOOKS))
    assert watched(3 * LOOKS, slowed=lambda: next(times, {})) == []


def test_a_stop_of_a_slow_rank_is_not_the_fault_that_is_looked_for():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            (hang,) = watched(LOOKS + 1, stopped_pid=process.pid)
            assert hang.worker == 10
            (hang,) = watched(3 * LOOKS + 1, stopped_pid=process.pid, slowed=lambda: {WorkerId(10): 3.0})
            assert hang.worker == 11
        finally:
            process.kill()


def test_every_culprit_is_told_of():
    told = watch(lambda: world("5:9/8", "5:8/8", "5:8/8"), 2)
    assert [event.worker for event in told] == [11, 12]
    assert {event.reason for event in told} == {judge(world("5:9/8", "5:8/8", "5:8/8"), {}, 0.02).reason}


def test_a_deadlock_of_the_script_is_said_once_and_nobody_is_ended():
    """It is told a second time only as another hang, after progress."""
    looks = []

    def look():
        looks.append(len(looks))
        return world("5:9/8", "5:9/8") if len(looks) <= 4 * LOOKS else world("6:9/8", "6:9/8")

    first, second = watch(look, 2)
    assert first.startswith("the job hangs, but no rank can be blamed")
    assert "5 steps completed" in first
    assert "6 steps completed" in second


def test_progress_between_looks_is_no_hang():
    steps = iter(range(20))
    seen = []

    def look():
        seen.append(next(steps, None))
        return world(f"{seen[-1]}:9/8", f"{seen[-1]}:8/8") if seen[-1] is not None else world("99:9/8", "99:8/8")

    watch(look, 1)
    assert len(seen) == 20 + 1 + LOOKS


def test_a_timeout_of_zero_never_looks():
    async def run():
        health = HangDetector(0, look=pytest.fail, pid=pytest.fail, submit=pytest.fail, print_line=pytest.fail)
        assert health._timer is None
        health.close()

    asyncio.run(run())


def test_a_process_stopped_by_a_signal_is_told_from_one_that_runs_or_has_ended():
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not is_stopped(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_stopped(process.pid), "a zombie"
    assert not is_stopped(process.pid)


# --- with the core ----------------------------------------------------------------------------------------------------


class Core:
    """The real coordinator in a job that runs: workers 0 to 2 hold ranks 0 to 2."""

    def __init__(self):
        self.state, self.now = coordinator.new_state(SETTINGS), 0.0
        self.tell(ev.JobSubmitted())
        for fact in (ev.WorkerReady, ev.ScriptInitialized, ev.SetupCompleted, ev.TranscriptCompleted):
            for worker in range(3):
                if fact is ev.WorkerReady:
                    self.tell(ev.WorkerStarted(WorkerId(worker), 100 + worker))
                self.tell(fact(WorkerId(worker)))
        assert self.state.phase is JobPhase.RUNNING

    def tell(self, event):
        effects = coordinator.step(SETTINGS, self.state, event, self.now)
        return [effect for effect in effects if isinstance(effect, KillWorker)]


@pytest.fixture
def status_page():
    fd = create_status_page(3)
    status_page = StatusPage(fd, 3)
    for rank_entry in status_page.rank_entries:
        rank_entry.phase, rank_entry.epoch = Phase.STEP, 1
    yield status_page
    status_page.close()
    os.close(fd)


def test_the_status_page_is_judged_only_while_every_rank_is_in_its_loop(status_page):
    core = Core()
    status_page.rank_entries[1].completed, status_page.rank_entries[1].issued, status_page.rank_entries[1].waited = (
        7,
        4,
        3,
    )
    assert sights_of(core.state, status_page)[1] == RankSight(Rank(1), WorkerId(1), 1, Phase.STEP, 7, 4, 3)
    assert sights_of(coordinator.new_state(SETTINGS), status_page) == ()
    status_page.rank_entries[
        2
    ].phase = Phase.ABORTED  # a collective of it failed by itself: the core waits for news of a loss
    assert sights_of(core.state, status_page) == ()
    status_page.rank_entries[2].phase = Phase.FINISHED
    assert len(sights_of(core.state, status_page)) == 3


def test_a_rank_is_looked_at_in_the_first_steps_and_between_the_runs_of_the_trial(status_page):
    state = Core().state
    state.phase = JobPhase.SETTING_UP
    status_page.rank_entries[1].phase = Phase.RESTORING
    assert len(sights_of(state, status_page)) == 3
    status_page.rank_entries[1].phase = Phase.SETUP
    assert sights_of(state, status_page) == ()


def test_what_is_told_of_a_hang_kills_its_worker_and_only_once(status_page):
    core = Core()
    status_page.rank_entries[0].issued = status_page.rank_entries[2].issued = 1
    (culprit,) = judge(sights_of(core.state, status_page), {}, 600).culprits
    (kill,) = core.tell(ev.WorkerHung(culprit.worker, "it hangs"))
    assert (kill.worker, kill.reason) == (1, "it hangs")
    assert core.tell(ev.WorkerHung(culprit.worker, "it hangs")) == []


def test_a_rank_that_is_stopped_as_a_repair_begins_is_ended_by_the_repairs_own_timeouts(status_page):
    core = Core()
    core.tell(ev.WorkerExited(WorkerId(1), None, 9, (Version(5),)))
    core.tell(ev.AbortCompleted(WorkerId(0), Epoch(2), Version(5), Version(5), (Version(5),)))
    assert sights_of(core.state, status_page) == (), "not a matter of health"
    core.now = SETTINGS.abort_timeout_s - 1
    assert core.tell(ev.TimeAdvanced()) == []
    core.now = SETTINGS.abort_timeout_s
    core.tell(ev.TimeAdvanced())
    assert core.state.members[WorkerId(2)].phase is MemberPhase.UNWINDING, "it is told to run its script again"
    core.now += UNWIND_S
    assert 2 in {kill.worker for kill in core.tell(ev.TimeAdvanced())}
