"""A terminal that a full-screen view has for itself, and gives back as it was, whatever ends the view."""

import contextlib
import os
import select
import signal
import termios
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

_ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""Alternate screen, no cursor, no wrapping of long lines."""
_LEAVE = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_BEGIN_FRAME = "\x1b[?2026h"
"""The terminal shows nothing until the frame is complete. Those that do not know the mode ignore it."""
_END_FRAME = "\x1b[?2026l"
_CHUNK = 4096
_IFLAG, _LFLAG, _CC = 0, 3, 6
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end the view, and then this process."""
_TAKEN = (signal.SIGINT, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH, *ENDING)


class TerminalGoneError(OSError):
    """The terminal was closed, as a window or a connection is."""


class Terminal:
    """A context manager. Inside, keys come one by one, and frames are drawn without flicker.

    Signals are only noted: `wait` returns them. Ctrl-C and Ctrl-Z stay signals. What draws raises `TerminalGoneError`: the terminal
    may be gone before its SIGHUP comes.
    """

    def __init__(self, keyboard: int, screen: int) -> None:
        """Prepare for these descriptors, both of a terminal."""
        self.keyboard = keyboard
        """Ready in `wait` when `read` has something."""
        self._screen = screen
        self._before: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._noted, self._note = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lines: list[str] | None = None

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self.keyboard)
        self._wakeup = signal.set_wakeup_fd(self._note, warn_on_full_buffer=False)
        for number in _TAKEN:
            self._handlers[number] = signal.signal(number, _ignore)
        try:
            self.take()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()

    def _leave(self) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._noted)
        os.close(self._note)

    @property
    def size(self) -> tuple[int, int]:
        """The columns and the lines; 80 and 24 if the terminal does not know them."""
        with _gone():
            columns, lines = os.get_terminal_size(self._screen)
        return columns or 80, lines or 24

    def wait(self, others: Sequence[int], timeout_s: float | None) -> tuple[set[int], set[signal.Signals]]:
        """Wait for a key, a signal, or data at one of the other descriptors; return the ready descriptors, and the signals."""
        ready, _, _ = select.select([self.keyboard, self._noted, *others], [], [], timeout_s)
        signals: set[signal.Signals] = set()
        if self._noted in ready:
            signals = {signal.Signals(number) for number in os.read(self._noted, _CHUNK)}
        return {*ready} - {self._noted}, signals

    def read(self) -> bytes:
        """Return what was typed; nothing if the terminal is gone."""
        with contextlib.suppress(OSError):
            return os.read(self.keyboard, _CHUNK)
        return b""

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines, one for each line of the screen. Only lines that have changed are sent."""
        old = self._lines
        changed = [
            f"\x1b[{number};1H{line}\x1b[0m\x1b[K"
            for number, line in enumerate(lines, 1)
            if old is None or number > len(old) or old[number - 1] != line
        ]
        if old is None or len(old) > len(lines):
            changed.append(f"\x1b[{len(lines)};1H\x1b[0m" + (lines[-1] if lines else "") + "\x1b[0m\x1b[J")
        self._lines = [*lines]
        if changed:
            self._write((_BEGIN_FRAME + "".join(changed) + _END_FRAME).encode())

    def redraw(self) -> None:
        """Have the next frame drawn in full, as after a change of size."""
        self._lines = None

    def stop(self) -> None:
        """Give the terminal back and stop, as Ctrl-Z asks; return when the process goes on."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _ignore)
        self.take()

    def take(self) -> None:
        """Have the terminal send each key at once, and not show it. Again after a stop, as a shell has changed that.

        Ctrl-S is a key too: output never waits for Ctrl-Q.
        """
        modes = [*self._before]
        modes[_IFLAG] &= ~termios.IXON
        modes[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
        modes[_CC] = [*modes[_CC]]
        modes[_CC][termios.VMIN], modes[_CC][termios.VTIME] = 1, 0
        with _gone():
            termios.tcsetattr(self.keyboard, termios.TCSANOW, modes)
        self._write(_ENTER)
        self.redraw()

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._write(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcflush(self.keyboard, termios.TCIFLUSH)  # a late key is not for the shell
            termios.tcsetattr(self.keyboard, termios.TCSANOW, self._before)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        with _gone():
            while left:
                left = left[os.write(self._screen, left) :]


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except (OSError, termios.error) as error:
        raise TerminalGoneError(*error.args) from error


def _ignore(number: int, frame: object) -> None:
    """Do nothing: `signal.set_wakeup_fd` notes the signal."""
