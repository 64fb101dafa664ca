"""A terminal with a screen: what a person sees of a program, and types. Knows the few sequences that the programs here use."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

_TOKEN = re.compile(
    rb"\x1b\[([?0-9;]*)([A-Za-z])|\x1b([()][A-B0]|[=>])|\x1b\][^\x07]*\x07|([\x00-\x1f\x7f])|([^\x00-\x1f\x7f]+)",
    re.DOTALL,
)
_OPEN = re.compile(rb"\x1b(?:\[[?0-9;]*|\][^\x07]*|[()])?\Z")


class Screen:
    """The cells of a terminal, the main and the alternate screen."""

    def __init__(self, columns: int, lines: int) -> None:
        self.resize(columns, lines)
        self._is_old = False
        """Whether frames of the size before may still come."""
        self.modes: dict[int, bool] = {7: True, 25: True, 1049: False}
        self.drawn = 0
        """How many lines were written to so far."""
        self.erased = 0
        """How often the whole screen was erased."""
        self._rest = b""

    def resize(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self._cells = [[" "] * columns for _ in range(lines)]
        self._main: list[list[str]] = [[" "] * columns for _ in range(lines)]
        self._row = self._column = 0
        self._line = 1
        """The line that the program named last; the terminal may have fewer."""
        self._saved = (0, 0)
        self._is_old = True

    @property
    def rows(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    @property
    def text(self) -> str:
        return "\n".join(self.rows)

    def feed(self, data: bytes) -> None:
        data, self._rest = self._rest + data, b""
        if begun := _OPEN.search(data):
            data, self._rest = data[: begun.start()], data[begun.start() :]
        at = 0
        while at < len(data):
            token = _TOKEN.match(data, at)
            assert token, f"an unknown sequence: {data[at : at + 20]!r}"
            at = token.end()
            values, letter, _, control, text = token.groups()
            if letter:
                self._command(values.decode(), letter.decode())
            elif control:
                self._control(control)
            elif text:
                self._print(text.decode("utf-8", "replace"))

    def _print(self, text: str) -> None:
        for character in text:
            if self._column >= self.columns:
                if not self.modes[7]:
                    continue
                self._column = 0
                self._down()
            self._cells[self._row][self._column] = character
            self._column += 1

    def _down(self) -> None:
        if self._row == self.lines - 1:
            self._cells = [*self._cells[1:], [" "] * self.columns]
        else:
            self._row += 1

    def _control(self, control: bytes) -> None:
        match control:
            case b"\n":
                self._down()
            case b"\r":
                self._column = 0
            case b"\b":
                self._column = max(0, self._column - 1)
            case _:
                assert control in b"\x07\t", f"an unknown control character: {control!r}"

    def _command(self, values: str, letter: str) -> None:
        numbers = [int(value or 0) for value in values.lstrip("?").split(";")]
        match letter:
            case "H":
                line, self._column = max(1, numbers[0]), max(1, (*numbers, 1)[1]) - 1
                self.drawn += 1
                assert line <= self.lines or self._is_old, f"line {line} of {self.lines}"
                self._row, self._line = min(line, self.lines) - 1, line
            case "K":
                self._cells[self._row][self._column :] = [" "] * (self.columns - self._column)
            case "J":
                whole = numbers[0] == 2
                self._is_old = self._is_old and self._line != self.lines  # a frame ends with this on its last line
                self.erased += whole
                first = 0 if whole else self._row + 1
                if not whole:
                    self._command("", "K")
                for row in range(first, self.lines):
                    self._cells[row] = [" "] * self.columns
            case "h" | "l":
                assert values.startswith("?"), values
                for number in numbers:
                    if number == 1049 and self.modes[1049] is not (letter == "h"):
                        self._cells, self._main = self._main, self._cells
                        (self._row, self._column), self._saved = self._saved, (self._row, self._column)
                        if letter == "h":
                            self._cells = [[" "] * self.columns for _ in range(self.lines)]
                    self.modes[number] = letter == "h"
            case "m":
                pass
            case _:
                raise AssertionError(f"an unknown command: {values!r} {letter!r}")


class Terminal:
    """A program that leads a session on its own terminal."""

    WAIT_S = 60.0

    def __init__(self, *command: str, columns: int = 80, lines: int = 24, env: dict[str, str] | None = None) -> None:
        self._near, self.far = os.openpty()
        self.screen = Screen(columns, lines)
        self._set_size()
        self.before = termios.tcgetattr(self.far)
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        # setsid(1) makes the terminal the controlling one of a new session, so that Ctrl-C and Ctrl-Z are signals.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=self.far, stdout=self.far, stderr=self.far, env=environment
        )

    def _set_size(self) -> None:
        fcntl.ioctl(self.far, termios.TIOCSWINSZ, struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        """Change the size; the terminal's foreground processes get SIGWINCH."""
        self.screen.resize(columns, lines)
        self._set_size()

    @property
    def modes(self) -> list:
        """The terminal's modes, as tcgetattr(3) gives them."""
        return termios.tcgetattr(self.far)

    def read(self, timeout_s: float = 0.0) -> bool:
        """Read what the program has written; return whether there was anything."""
        if not select.select([self._near], [], [], timeout_s)[0]:
            return False
        self.screen.feed(os.read(self._near, 1 << 16))
        return True

    def wait(self, met: Callable[[Screen], object], what: str) -> None:
        """Wait until the screen is so."""
        deadline = time.monotonic() + self.WAIT_S
        while not met(self.screen):
            assert self.read(max(0.0, deadline - time.monotonic())), f"no {what} on the screen:\n{self.screen.text}"

    def wait_for(self, *texts: str) -> None:
        """Wait until the screen shows all these."""
        self.wait(lambda screen: all(text in screen.text for text in texts), repr(texts))

    def wait_gone(self, text: str) -> None:
        """Wait until the screen does not show this."""
        self.wait(lambda screen: text not in screen.text, f"end of {text!r}")

    def type(self, text: str) -> None:
        os.write(self._near, text.encode())

    def exit_code(self) -> int:
        """Wait for the program's end, and read all that it has written."""
        deadline = time.monotonic() + self.WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"the program has not ended:\n{self.screen.text}"
            self.read(0.05)
        while self.read():
            pass
        return self.process.returncode

    def check_restored(self) -> None:
        """Assert that the terminal is as it was before the program."""
        assert self.modes == self.before
        assert self.screen.modes[7], "long lines do not wrap"
        assert self.screen.modes[25], "the cursor is hidden"
        assert not self.screen.modes[1049], "the alternate screen is shown"

    def hang_up(self) -> None:
        """Close both ends: the window is gone."""
        os.close(self.far)
        os.close(self._near)
        self.far = self._near = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        if self.far >= 0:
            self.hang_up()


def keys(names: Sequence[str]) -> str:
    """Return what a terminal sends for these keys."""
    known = {
        "up": "\x1b[A",
        "down": "\x1b[B",
        "page up": "\x1b[5~",
        "page down": "\x1b[6~",
        "home": "\x1b[H",
        "end": "\x1b[F",
    }
    return "".join(known.get(name, name) for name in names)
