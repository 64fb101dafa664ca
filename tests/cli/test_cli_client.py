"""The viewer's side of the control socket, against the real server."""

import asyncio
import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from deadpool_run.cli.runs.client import ControlClient, connect
from deadpool_run.coordinator.address import control_address
from deadpool_run.coordinator.control import ControlServer
from deadpool_run.coordinator.requests import RequestHandler
from deadpool_run.core import coordinator
from deadpool_run.core.events import AgentKillRequested, JobSubmitted, KillRequested, NodeJoined, Place, SlowRequested
from deadpool_run.core.injection import KillHow
from deadpool_run.core.settings import Settings
from deadpool_run.errors import NoSuchRunError, RequestRefusedError, UsageError
from deadpool_run.ids import NodeId, Rank, WorkerId

WAIT_S = 30
ONE_OF = "name exactly one of RANK, --random, --node, --spare and --agent; it got "


class Run:
    """A run of two ranks whose status a test sets."""

    def __init__(self, run_dir, *, finds_hangs=True):
        self.run_dir, self.finds_hangs = run_dir, finds_hangs
        self.events = []
        self.ended = False
        self.shown = {
            "phase": "running",
            "epoch": 1,
            "run": {"run_id": "night", "world_size": 2, "spares": 0, "started": "2026-02-03T04:05:06+00:00"},
            "ranks": [{"rank": rank, "pid": 10 + rank, "worker": rank, "phase": "running"} for rank in range(2)],
            "spares": [],
        }

    def status(self):
        return self.shown

    def holder(self, rank):
        return (int(rank), 10 + rank) if rank == 1 else None

    def submit(self, event):
        self.events.append(event)

    def change(self, **parts):
        self.shown = {**self.shown, **parts}
        self.loop.call_soon_threadsafe(self.server.notify)

    def end(self):
        if not self.ended:
            self.ended = True
            self.loop.call_soon_threadsafe(self.over.set)

    async def serve(self, listening):
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        request_handler = RequestHandler(2, self, finds_hangs=self.finds_hangs)

        async def answer(request):
            return await request_handler.encoded(request)

        self.server = ControlServer(self.run_dir, answer)
        await self.server.start()
        listening.set()
        await self.over.wait()
        await self.server.close()


@contextmanager
def serving(run_dir, **settings):
    run_dir.mkdir(parents=True)
    run, listening = Run(run_dir, **settings), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(run.serve(listening)))
    thread.start()
    try:
        assert listening.wait(WAIT_S)
        yield run
    finally:
        run.end()
        thread.join(WAIT_S)


@pytest.fixture
def live(tmp_path):
    with serving(tmp_path / "night") as run:
        yield run


def deadpool(*words, **more):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEADPOOL_")}
    return subprocess.run(
        [sys.executable, "-m", "deadpool_run", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        **{"env": environment, **more},
    )


def test_a_run_answers(live):
    with ControlClient(live.run_dir) as run:
        assert run.ask({"do": "status"}) == live.shown
        done = run.ask({"do": "kill-rank", "rank": 1, "how": "sigterm"})
        assert (done["worker"], done["pid"], done["how"]) == (1, 11, "sigterm")
        with pytest.raises(RequestRefusedError, match="no worker holds rank 0"):
            run.ask({"do": "kill-rank", "rank": 0})
        assert run.ask({"do": "status"}) == live.shown, "a refusal must not end the conversation"
    assert live.events == [KillRequested(Rank(1), KillHow.SIGTERM)]


def test_the_run_ends_while_it_is_watched(live):
    with ControlClient(live.run_dir) as run:
        statuses = run.watch(60.0)
        assert next(statuses)["epoch"] == 1
        live.change(epoch=2)
        assert next(statuses)["epoch"] == 2
        live.end()
        assert list(statuses) == []


def test_a_run_directory_with_a_long_path(tmp_path):
    with serving(tmp_path / ("d" * 100) / ("e" * 100)) as live, ControlClient(live.run_dir) as run:
        assert run.ask({"do": "status"}) == live.shown


def test_a_directory_without_a_run(tmp_path):
    with pytest.raises(NoSuchRunError, match="no such directory"):
        ControlClient(tmp_path / "nowhere")
    with pytest.raises(NoSuchRunError, match="no run has its control socket here"):
        ControlClient(tmp_path)


def stale(run_dir):
    """Create the files that a killed agent leaves."""
    run_dir.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead, control_address(run_dir) as address:
        dead.bind(address)
    (run_dir / "run.json").write_text('{"pid": 4711}')


def test_a_run_whose_agent_is_gone_is_told_from_a_live_one(tmp_path):
    stale(tmp_path / "dead")
    with pytest.raises(NoSuchRunError, match=r"the run has ended: its agent \(pid 4711\)"):
        ControlClient(tmp_path / "dead")


def test_the_only_live_run_is_found(tmp_path):
    stale(tmp_path / "dead")
    with serving(tmp_path / "older"):
        with serving(tmp_path / "newer" / "node-a"):
            with pytest.raises(UsageError, match="2 runs are live: newer, older\nchoose one with --run-id"):
                connect(None, tmp_path)
            with connect(tmp_path / "newer", tmp_path) as run:
                assert run.run_dir == tmp_path / "newer" / "node-a"
        with connect(None, tmp_path) as run:
            assert run.run_dir == tmp_path / "older"
    with pytest.raises(NoSuchRunError, match="no live run below"):
        connect(None, tmp_path)


def test_status_and_its_exit_codes(live):
    where = ("--run-dir", str(live.run_dir))
    done = deadpool("status", *where)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run night  running")
    live.change(phase="repairing")
    done = deadpool("status", "--json", *where)
    assert done.returncode == 3
    assert json.loads(done.stdout)["phase"] == "repairing"


def test_a_workers_environment_names_its_run(live):
    done = deadpool("status", "--json", env={**os.environ, "DEADPOOL_RUN_DIR": str(live.run_dir)})
    assert json.loads(done.stdout)["run"]["run_id"] == "night"


def test_watching_as_json_gives_a_line_a_status(live):
    command = [sys.executable, "-m", "deadpool_run", "status", "--watch", "--json", "--run-dir", str(live.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert json.loads(viewer.stdout.readline())["epoch"] == 1
        live.change(epoch=2, phase="repairing")
        while (line := json.loads(viewer.stdout.readline()))["epoch"] == 1:
            pass
        assert line["health"] == "recovering"
        live.end()
        assert viewer.wait(WAIT_S) == 3


def test_a_reader_that_has_seen_enough_is_no_error(live):
    command = [sys.executable, "-m", "deadpool_run", "status", "--watch", "--json", "--run-dir", str(live.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        viewer.stdout.readline()
        viewer.stdout.close()
        live.change(epoch=2)
        assert viewer.wait(WAIT_S) == 1
        assert viewer.stderr.read() == ""


def test_kill_rank_works_plainly_in_a_script(live):
    done = deadpool("kill-rank", "1", "--how", "sigsegv", "--run-dir", str(live.run_dir))
    assert (done.returncode, done.stdout) == (0, "rank 1: worker 1 (pid 11) was sent SIGSEGV\n")
    assert "no spare is ready" in done.stderr
    assert live.events == [KillRequested(Rank(1), KillHow.SIGSEGV)]


def test_a_random_rank_a_node_or_a_spare_is_killed(live):
    where = ("--run-dir", str(live.run_dir))
    ranks = [{**rank, "node": f"n{rank['rank']}", "step": 3, "activity": "step"} for rank in live.shown["ranks"]]
    live.shown = {**live.shown, "ranks": [{**ranks[0], "pid": None}, ranks[1]]}
    live.shown["nodes"] = [{"node": "n0"}, {"node": "n1"}]
    assert "rank 1: worker 1 " in deadpool("kill-rank", "--random", "--seed", "5", *where).stdout
    assert (
        "rank 1: worker 1 " in deadpool("kill-rank", "--node", "n1", "--count", "2", "--every", "10ms", *where).stdout
    )
    assert live.events == [KillRequested(Rank(1), KillHow.SIGKILL)] * 3
    assert "there is no node n7: nodes are n0, n1" in deadpool("kill-rank", "--node", "n7", *where).stderr
    idle = deadpool("kill-rank", "--node", "n0", *where)
    assert (idle.returncode, idle.stdout) == (1, "")
    assert "no rank of node n0 has a process now: nodes with ranks are n1\n  name one of them, or" in idle.stderr
    assert "no spare is ready now" in deadpool("kill-rank", "--spare", *where).stderr
    live.shown = {**live.shown, "spares": [{"worker": 8, "pid": 18, "phase": "ready"}]}
    killed = deadpool("kill-rank", "--spare", "--how", "exit", *where)
    assert killed.stdout == "spare: worker 8 (pid 18) was told to exit\n"
    assert live.events[3:] == [KillRequested(Rank(-1), KillHow.EXIT, WorkerId(8))]
    assert deadpool("kill-rank", "--spare", "--how", "oom", *where).stdout.endswith("was told to exit\n")
    assert deadpool("kill-rank", "1", "--how", "oom", *where).stdout.endswith("was told to run out of memory\n")


@pytest.mark.parametrize("victim", ["--random", "--node n1"])
def test_without_a_process_there_is_nothing_to_kill(live, victim):
    live.shown = {**live.shown, "ranks": [{"rank": rank, "pid": None, "node": None} for rank in range(2)]}
    live.shown["nodes"] = [{"node": "n0"}, {"node": "n1"}]
    done = deadpool("kill-rank", *victim.split(), "--run-dir", str(live.run_dir))
    assert (done.returncode, done.stdout, live.events) == (1, "", [])
    assert "no rank has a process now\n  try again after the repair\n" in done.stderr


@pytest.mark.parametrize("called", ["n1~2", "n1.site.org", "n1"])
def test_the_ranks_of_a_node_are_killed_by_its_name(live, called):
    live.shown["nodes"] = [{"node": f"n{at}", "name": f"n{at}.site.org"} for at in (0, 2)]
    live.shown["nodes"].append({"node": "n1~2", "name": "n1.site.org"})
    ranks = zip(live.shown["ranks"], ("n0", "n1~2"), strict=True)
    live.shown = {**live.shown, "ranks": [{**rank, "node": node} for rank, node in ranks]}
    done = deadpool("kill-rank", "--node", called, "--run-dir", str(live.run_dir))
    assert done.stdout == "rank 1: worker 1 (pid 11) was sent SIGKILL\n", done.stderr


def over_nodes(*names):
    settings = Settings(world_size=2, nodes=len(names))
    state = coordinator.new_state(settings)
    for number, name in enumerate(names):
        place = Place(f"{name}.example")
        event = NodeJoined(NodeId(name), place) if number else JobSubmitted(NodeId(name), place)
        coordinator.step(settings, state, event, 0.0)
    return state


def test_a_rank_is_slowed(live):
    where = ("--run-dir", str(live.run_dir))
    slowed = deadpool("kill-rank", "1", "--how", "slow:2.5", "--for", "30s", *where)
    assert slowed.stdout == "rank 1: worker 1 (pid 11) is slowed 2.5 times for 30 s\n", slowed.stderr
    assert live.events == [SlowRequested(Rank(1), 2.5, 30.0)]
    with ControlClient(live.run_dir) as run, pytest.raises(RequestRefusedError, match="the factor must be above 1"):
        run.ask({"do": "slow-rank", "rank": 1, "factor": 1, "for_s": 30})


@pytest.mark.parametrize("how", ["hang", "sigstop"])
def test_a_hang_that_the_job_does_not_look_for_needs_yes(tmp_path, how):
    with serving(tmp_path / "night", finds_hangs=False) as run:
        line = ("kill-rank", "1", "--how", how, "--run-dir", str(run.run_dir))
        refused = deadpool(*line)
        assert (refused.returncode, refused.stdout, run.events) == (1, "", [])
        assert f"{how}: the process would live, and with --hang-timeout 0 the job looks for no hangs" in refused.stderr
        assert refused.stderr.endswith("  choose another --how, or add --yes\n")
        assert deadpool(*line, "--yes").returncode == 0
        assert run.events == [KillRequested(Rank(1), KillHow(how))]
        assert deadpool("kill-rank", "1", "--run-dir", str(run.run_dir)).returncode == 0


def test_the_agent_of_a_node_is_killed(live):
    line = ("kill-rank", "--agent", "--run-dir", str(live.run_dir))
    live.state = over_nodes("a", "b")
    assert "name the node: nodes are a, b" in deadpool(*line).stderr
    assert "there is no node c: nodes are a, b" in deadpool(*line, "--node", "c").stderr
    assert live.events == []
    killed = deadpool(*line, "--node", "b.example")
    assert killed.stdout == "node b without ranks: its agent was sent SIGKILL\n", killed.stderr
    assert live.events == [AgentKillRequested(NodeId("b"))]


def test_the_agent_of_the_only_node_is_killed_with_yes_alone(live):
    line = ("kill-rank", "--agent", "--run-dir", str(live.run_dir))
    live.state = over_nodes("a")
    refused = deadpool(*line, "--node", "a")
    assert (refused.returncode, live.events) == (1, [])
    assert "node a.example is the only one: the job would end with its agent" in refused.stderr
    assert deadpool(*line, "--yes").returncode == 0
    assert live.events == [AgentKillRequested(NodeId("a"))]


def test_kill_rank_waits_for_a_step_and_a_phase(live):
    where = ("--run-dir", str(live.run_dir))
    command = [sys.executable, "-m", "deadpool_run", "kill-rank", "1", "--at-step", "7", "--phase", "optimizer", *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as killer:
        for step, activity in ((6, "optimizer"), (7, "step"), (8, "optimizer")):
            assert live.events == []
            live.change(ranks=[{**rank, "step": step, "activity": activity} for rank in live.shown["ranks"]])
        assert killer.stdout.readline() == "rank 1: worker 1 (pid 11) was sent SIGKILL\n"
        assert killer.wait(WAIT_S) == 0


def test_a_job_that_is_not_protected_is_only_hurt_with_yes(live):
    live.shown = {**live.shown, "phase": "setting up"}
    line = ("kill-rank", "1", "--run-dir", str(live.run_dir))
    refused = deadpool(*line)
    assert (refused.returncode, "or add --yes" in refused.stderr, live.events) == (1, True, [])
    assert deadpool(*line, "--yes", "--how", "sigstop").returncode == 0
    assert live.events == [KillRequested(Rank(1), KillHow.SIGSTOP)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", f"{ONE_OF}none\n  for example `deadpool-run kill-rank 1`"),
        ("1 --random", f"{ONE_OF}RANK and --random\n"),
        ("1 --random --node n0 --spare", f"{ONE_OF}RANK, --random, --node and --spare\n"),
        (
            "--random --phase step",
            "--phase: needs a RANK, and --random names none\n  write `kill-rank 2 --phase step`",
        ),
        ("--node n0 --phase step", "--phase: needs a RANK, and --node names none"),
        ("1 --phase stop", "--phase 'stop': not a phase\n  write one of setup, rehearsal, step, "),
        ("1 --every soon", "--every 'soon': not a duration"),
        ("1 --how nuke", "--how 'nuke': no way to fail\n  write one of sigkill, sigterm,"),
        ("1 --how slow:0.5", "--how 'slow:0.5': the factor must be above 1"),
        ("1 --for 30s", "--for: only a slow rank has a time"),
        ("--spare --how slow:2", "--spare: a spare has no steps to slow"),
        ("1 --agent", "--agent: goes with --node and --at-step only"),
        ("--agent --how exit", "--agent: goes with --node and --at-step only"),
    ],
)
def test_an_unclear_order_to_kill_is_refused(live, words, why):
    done = deadpool("kill-rank", *words.split(), "--run-dir", str(live.run_dir))
    assert (done.returncode, live.events) == (2, [])
    assert why in done.stderr


def test_kill_rank_says_why_not(live):
    done = deadpool("kill-rank", "7", "--run-dir", str(live.run_dir))
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no rank 7: ranks are 0 to 1" in done.stderr
    assert live.events == []


@pytest.mark.parametrize("words", [(), ("1", "--here")])
def test_a_drain_names_one_target(live, words):
    done = deadpool("drain", *words, "--run-dir", str(live.run_dir))
    assert (done.returncode, done.stdout) == (2, "")
    assert "name exactly one of NODE, RANK and --here\n  for example `deadpool-run drain 1`" in done.stderr


class Terminal:
    """A command on its own terminal."""

    def __init__(self, *words):
        self._near, far = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deadpool_run", *words],
            stdin=far,
            stdout=far,
            stderr=far,
            start_new_session=True,
            env=environment,
        )
        os.close(far)
        self.text = ""

    def wait_for(self, words):
        deadline = time.monotonic() + WAIT_S
        while words not in self.text:
            ready = select.select([self._near], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"no {words!r} in {self.text!r}"
            self.text += os.read(self._near, 1 << 16).decode()

    def type(self, words):
        os.write(self._near, words.encode())

    def close(self):
        code = self._process.wait(WAIT_S)
        os.close(self._near)
        return code


def test_on_a_terminal_kill_rank_asks(live):
    terminal = Terminal("kill-rank", "1", "--run-dir", str(live.run_dir))
    terminal.wait_for("Kill rank 1 of night with sigkill? [y/N]")
    terminal.type("n\n")
    assert terminal.close() == 1
    assert live.events == []
    terminal = Terminal("kill-rank", "1", "--run-dir", str(live.run_dir))
    terminal.wait_for("[y/N]")
    terminal.type("y\n")
    terminal.wait_for("was sent SIGKILL")
    assert terminal.close() == 0
    assert live.events == [KillRequested(Rank(1), KillHow.SIGKILL)]
    terminal = Terminal("kill-rank", "1", "--yes", "--run-dir", str(live.run_dir))
    terminal.wait_for("was sent SIGKILL")
    assert terminal.close() == 0
    assert "[y/N]" not in terminal.text


def test_the_question_says_that_the_job_is_not_protected(live):
    live.shown = {**live.shown, "phase": "setting up"}
    terminal = Terminal("kill-rank", "1", "--run-dir", str(live.run_dir))
    terminal.wait_for("[y/N]")
    assert "The job is not protected: all ranks restart, or the job ends. Kill rank 1 of night" in terminal.text
    terminal.type("y\n")
    terminal.wait_for("was sent SIGKILL")
    assert terminal.close() == 0


def test_on_a_terminal_status_is_live_until_the_run_ends(live):
    terminal = Terminal("status", "--run-dir", str(live.run_dir))
    terminal.wait_for("epoch 1")
    live.change(epoch=2)
    terminal.wait_for("epoch 2")
    live.end()
    terminal.wait_for("the run has ended")
    assert terminal.close() == 0
    assert "\x1b[" in terminal.text


def test_on_a_terminal_once_is_one_plain_snapshot(live):
    terminal = Terminal("status", "--once", "--run-dir", str(live.run_dir))
    terminal.wait_for("spares: none")
    assert terminal.close() == 0
    assert terminal.text.count("epoch 1") == 1
