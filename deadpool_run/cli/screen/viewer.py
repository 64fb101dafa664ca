"""Shows a run on a terminal until the user leaves or the run ends."""

import os
import signal
import time
from collections.abc import Collection
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from deadpool_run.cli.runs.client import ControlClient
from deadpool_run.cli.screen.feed import StatusFeed
from deadpool_run.cli.screen.keys import KeyReader
from deadpool_run.cli.screen.page import ScreenSize, screen_lines
from deadpool_run.cli.screen.rank_log import log_lines
from deadpool_run.cli.screen.records import RunRecords
from deadpool_run.cli.screen.state import Kill, Quit, ScreenState, first_order
from deadpool_run.cli.screen.terminal import ENDING, Terminal, TerminalGoneError
from deadpool_run.cli.screen.watch import EVERY_S
from deadpool_run.core.injection import KillHow
from deadpool_run.errors import DeadpoolError
from deadpool_run.view.health import EXIT_CODES, Status, health
from deadpool_run.view.pace import completed
from deadpool_run.view.render import header

_ESCAPE_S = 0.05
"""How long the rest of a key's escape sequence may take."""


def show_screen(run: ControlClient, console: Console, keyboard: int) -> int:
    """Show the run, and return the exit code for its last health. Ends as SIGTERM or SIGHUP ask for, if one comes."""
    first = run.ask({"do": "status"})
    with (
        StatusFeed(run, EVERY_S) as feed,
        RunRecords(run.run_dir) as records,
        Terminal(keyboard, console.file.fileno()) as terminal,
    ):
        viewer = _Viewer(run, first, console, records)
        ended_by = viewer.show(feed, terminal)
    if ended_by is not None:
        signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    if viewer.run_ended:
        for line in header(viewer.state.status, _now()):
            console.print(line)
        console.print(Text("the run has ended"))
    return EXIT_CODES[health(viewer.state.status)]


class _Viewer:
    """One view of one run."""

    def __init__(self, run: ControlClient, first: Status, console: Console, records: RunRecords) -> None:
        self.state = ScreenState(first, first_order(first))
        self.run_ended = False
        self._run, self._console, self._records = run, console, records
        self._keys = KeyReader()

    def show(self, feed: StatusFeed, terminal: Terminal) -> signal.Signals | None:
        """Show the run until it ends or the user leaves; return the signal that ends this process, if one does."""
        try:
            return self._show(feed, terminal)
        except TerminalGoneError:
            return signal.SIGHUP

    def _show(self, feed: StatusFeed, terminal: Terminal) -> signal.Signals | None:
        while not self.run_ended:
            self._draw(terminal)
            ready, signals = terminal.wait([feed.fd], _ESCAPE_S if self._keys.is_open else None)
            if ending := signals.intersection(ENDING):
                return min(ending)
            if signal.SIGINT in signals:
                return None
            _obey(signals, terminal)
            if feed.fd in ready:
                self._take(feed)
            keys: list[str] = []
            if terminal.keyboard in ready:
                if not (data := terminal.read()):
                    return signal.SIGHUP  # the terminal is gone
                keys = self._keys.feed(data)
            elif not ready and not signals:
                keys = self._keys.flush()
            if not all(self._press(key, terminal) for key in keys):
                return None
        return None

    def _take(self, feed: StatusFeed) -> None:
        self.run_ended = feed.ended
        if (status := feed.take()) is not None:
            self.state.note(status)
            recorded = self._records.of(status)
            self.state.events, self.state.pace.recorded = recorded.events, recorded.steps_per_s
            self.state.pace.note(completed(status), time.monotonic())

    def _press(self, key: str, terminal: Terminal) -> bool:
        """Do what a key asks for, and return whether the view goes on."""
        if key == "redraw":
            terminal.redraw()
        match self.state.press(key):
            case Quit():
                return False
            case Kill() as kill:
                self.state.message = self._kill(kill)
            case None:
                pass
        return True

    def _kill(self, kill: Kill) -> str:
        """Kill the rank's worker, and return the words for the user."""
        if self.state.rank(kill.rank).get("worker") != kill.worker:
            return f"rank {kill.rank} has another worker now: nothing was killed"
        try:
            with ControlClient(self._run.run_dir) as control:
                done = control.ask({"do": "kill-rank", "rank": kill.rank, "how": KillHow.SIGKILL.value})
        except DeadpoolError as error:
            return str(error).splitlines()[0]
        return f"rank {done['rank']}: worker {done['worker']} (pid {done['pid']}) was sent SIGKILL"

    def _draw(self, terminal: Terminal) -> None:
        size = ScreenSize(*terminal.size, None if self._console.no_color else self._console.color_system)
        terminal.draw(screen_lines(self.state, _now(), size, self._log))

    def _log(self, rank: int, most: int) -> list[str]:
        return log_lines(self._run.run_dir, self.state.status, rank, most)


def _obey(signals: Collection[signal.Signals], terminal: Terminal) -> None:
    """Stop, go on after a stop, or note another size, as the signals ask."""
    if signal.SIGTSTP in signals:
        terminal.stop()
    elif signal.SIGCONT in signals:
        terminal.take()
    if signal.SIGWINCH in signals:
        terminal.redraw()


def _now() -> datetime:
    return datetime.now(UTC)
