"""The live status on a real terminal: 512 simulated ranks, every key, and the terminal as it was, whatever ends the view."""

import os
import re
import signal
import sys
import termios

import pytest
from cli.screen.test_screen_parts import status
from cli.test_cli_client import deadpool, serving
from kit.terminal import Terminal, keys

from deadpool_run.cli.screen.terminal import Terminal as ScreenTerminal
from deadpool_run.cli.screen.terminal import TerminalGoneError
from deadpool_run.core.events import KillRequested
from deadpool_run.core.injection import KillHow
from deadpool_run.ids import Rank

COMMAND = (sys.executable, "-m", "deadpool_run", "status", "--run-dir")


@pytest.fixture
def live(tmp_path):
    with serving(tmp_path / "night") as run:
        run.shown = status()
        yield run


@pytest.fixture
def terminal(live):
    opened = Terminal(*COMMAND, str(live.run_dir), "--watch")
    yield opened
    opened.close()


def changed(live, rank, **parts):
    ranks = [{**each, **(parts if each["rank"] == rank else {})} for each in live.shown["ranks"]]
    live.change(ranks=ranks)


def shown_ranks(screen):
    return [int(row.split()[0]) for row in screen.rows if re.match(r" *[0-9]+  n[0-9]", row)]


@pytest.mark.parametrize("columns", [80, 132])
def test_once_has_the_width_of_the_terminal_and_in_a_pipe_a_fixed_one(live, columns):
    live.shown = {**status(2), "phase": "repairing", "reason": " ".join(["word"] * 60)}
    words = ("status", "--once", "--run-dir", str(live.run_dir))
    terminal = Terminal(*COMMAND, str(live.run_dir), "--once", columns=columns, lines=30)
    try:
        assert terminal.exit_code() == 3
        rows = [len(row) for row in terminal.screen.rows if row.startswith("word") or row.endswith("word")]
        assert columns - 10 < max(rows) <= columns
        assert len(rows) > 300 // columns
    finally:
        terminal.close()
    assert 190 < max(map(len, deadpool(*words).stdout.splitlines())) <= 200


def test_512_ranks_are_usable_on_80_by_24(live, terminal):
    terminal.wait_for("run night  running", "of 512", "q quit  ? help")
    assert terminal.screen.modes[1049], "it must leave the shell's lines alone"
    terminal.type(keys(["end"]))
    terminal.wait(lambda screen: 511 in shown_ranks(screen), "last rank")
    terminal.type("ss")
    terminal.wait_for("sort: slowest first")
    terminal.type("g")
    terminal.wait(lambda screen: shown_ranks(screen)[:1] == [0], "first row")
    changed(live, 300, phase="restoring")
    terminal.wait(lambda screen: shown_ranks(screen)[:1] == [300], "rank 300 on top")
    terminal.type("?")
    terminal.wait_for("kill the selected rank's process", "q back")
    terminal.type("?")
    terminal.wait_for("q quit")
    terminal.type("\x1b")
    terminal.type("l")
    terminal.wait_for("no log files", "log of rank 0")
    terminal.type("\x1b")
    terminal.wait_for("q quit")
    terminal.type("q")
    assert terminal.exit_code() == 0
    terminal.check_restored()


def test_the_screen_averages_the_steps_that_it_has_seen(live, terminal):
    live.shown = status(8, total_steps=100_000)
    terminal.wait_for("81.3 steps/s")  # that of the last step, until there is something to average
    for step in (1000, 2000, 3000):
        live.change(ranks=[{**rank, "step": step} for rank in live.shown["ranks"]])
        terminal.wait_for(f"step {step:,}/")
    terminal.wait_gone("81.3 steps/s")
    terminal.type("q")
    assert terminal.exit_code() == 0


def test_only_what_changes_is_drawn(live, terminal):
    terminal.wait_for("of 512")
    erased = terminal.screen.erased
    for step in range(200, 220):
        drawn = terminal.screen.drawn
        changed(live, 3, step=step)
        terminal.wait(lambda screen, step=step: re.search(rf"(?m)^ +3  n00 .* {step} ", screen.text), f"step {step}")
        # The rank's line, and perhaps that of the progress and the age.
        assert terminal.screen.drawn - drawn <= 3, terminal.screen.text
    assert terminal.screen.erased == erased, "the screen flickers"
    terminal.type("q")
    assert terminal.exit_code() == 0


def test_k_kills_the_selected_rank_after_yes(live, terminal):
    live.shown = status(2)
    terminal.wait_for("q quit")
    terminal.type("1k")
    terminal.wait_for("Kill rank 1 (worker 1001) of night with sigkill? [y/N]")
    assert live.events == []
    terminal.type("n")
    terminal.wait_for("nothing was killed")
    terminal.type("k")
    terminal.wait_for("[y/N]")
    terminal.type("y")
    terminal.wait_for("rank 1: worker 1 (pid 11) was sent SIGKILL")
    assert live.events == [KillRequested(Rank(1), KillHow.SIGKILL)]
    terminal.type("0ky")
    terminal.wait_for("no worker holds rank 0 now")
    terminal.type("q")
    assert terminal.exit_code() == 0
    assert len(live.events) == 1


def test_a_rank_that_has_another_worker_by_now_is_not_killed(live, terminal):
    terminal.wait_for("q quit")
    terminal.type("1k")
    terminal.wait_for("Kill rank 1 (worker 1001)")
    changed(live, 1, worker=4711, phase="rehearsing")
    terminal.wait_for("rehearsing")
    terminal.type("y")
    terminal.wait_for("rank 1 has another worker now: nothing was killed")
    assert live.events == []


def test_the_view_follows_the_size_of_the_terminal(terminal):
    terminal.wait_for("of 512")
    for columns, lines in ((200, 50), (60, 12), (100, 30)):
        terminal.resize(columns, lines)
        terminal.wait(lambda screen, lines=lines: screen.rows[lines - 1].startswith("q quit"), f"{lines} lines")
        terminal.wait(lambda screen: "RANK" in screen.text and screen.rows[0].startswith("run night"), "head")
    terminal.type("q")
    assert terminal.exit_code() == 0
    terminal.check_restored()


def test_the_end_of_the_run_ends_the_view(live, terminal):
    terminal.wait_for("of 512")
    live.change(phase="stopping")
    terminal.wait_for("stopping (ending)")
    live.end()
    assert terminal.exit_code() == 3
    terminal.check_restored()
    assert "the run has ended" in terminal.screen.text
    assert "run night  stopping (ending)" in terminal.screen.text


@pytest.mark.parametrize("key", ["\x03", "q"])
def test_leaving_gives_the_health_of_the_run(live, terminal, key):
    terminal.wait_for("of 512")
    live.change(phase="repairing")
    terminal.wait_for("repairing (recovering)")
    terminal.type(key)
    assert terminal.exit_code() == 3
    terminal.check_restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_as_a_signal_does(terminal, number):
    terminal.wait_for("of 512")
    terminal.process.send_signal(number)
    assert terminal.exit_code() == -number
    terminal.check_restored()


@pytest.mark.parametrize("place", ["screen_lines", "log_lines"])
def test_an_exception_leaves_the_terminal_as_it_was(live, place):
    code = (
        "import sys\nfrom deadpool_run.cli.screen import viewer\n"
        f"def fail(*_): raise RuntimeError('planted')\n"
        f"viewer.{place} = fail\n"
        "from deadpool_run.cli.app import main\nmain()"
    )
    terminal = Terminal(sys.executable, "-c", code, "status", "--run-dir", str(live.run_dir))
    if place == "log_lines":
        terminal.wait_for("of 512")
        terminal.type("l")
    assert terminal.exit_code() == 1
    terminal.check_restored()
    assert "planted" in terminal.screen.text
    terminal.close()


def test_a_terminal_that_goes_away_ends_it(live):
    terminal = Terminal(*COMMAND, str(live.run_dir))
    terminal.wait_for("of 512")
    terminal.hang_up()
    assert terminal.process.wait(terminal.WAIT_S) == -signal.SIGHUP


def test_a_terminal_that_is_gone_is_told_apart_from_other_errors():
    """It may be drawn on after it has gone, and before its signal comes."""
    near, far = os.openpty()
    screen = ScreenTerminal(far, far)
    screen._before = termios.tcgetattr(far)
    os.close(near)
    for use in (lambda: screen.draw(["a line"]), lambda: screen.size, screen.take):
        with pytest.raises(TerminalGoneError):
            use()
    os.close(screen._noted)
    os.close(screen._note)
    os.close(far)


def test_ctrl_z_and_fg_of_a_shell(live, tmp_path):
    shell = Terminal(
        "bash", "--noprofile", "--norc", "-i", env={"PS1": "ready> ", "HISTFILE": str(tmp_path / "history")}
    )
    shell.wait_for("ready>")
    shell.type(f"{' '.join(COMMAND)} {live.run_dir}\n")
    for _ in range(2):
        shell.wait_for("of 512")
        shell.type("\x1a")
        shell.wait_for("Stopped")
        assert not shell.screen.modes[1049]
        assert shell.screen.modes[25]
        shell.type(
            "stty -a | tr ';' '\\n' | grep -ow -e '-\\?icanon' -e '-\\?echo' -e '-\\?ixon' | tr '\\n' ' '; echo modes\n"
        )
        shell.wait_for("ixon icanon echo modes")
        changed(live, 3, step=999)
        shell.type("clear; fg\n")
    shell.wait_for("of 512", " 999 ")
    shell.type("q")
    shell.wait(lambda screen: not screen.modes[1049] and "ready>" in screen.text, "prompt")
    shell.type("exit\n")
    assert shell.exit_code() == 0
    shell.close()


@pytest.mark.parametrize("words", [("--once",), ("--json",)])
def test_a_single_status_takes_no_keys(live, words):
    terminal = Terminal(*COMMAND, str(live.run_dir), *words, columns=250, lines=600)
    assert terminal.exit_code() == 0
    assert "night" in terminal.screen.text
    assert terminal.screen.drawn == 0
    terminal.check_restored()
    terminal.close()
