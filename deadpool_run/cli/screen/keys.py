"""Names of keys from the bytes of a terminal. Pure."""

import codecs
import re

_NAMES = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA"), "up"),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB"), "down"),
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    **dict.fromkeys((b"\x1b[H", b"\x1bOH", b"\x1b[1~", b"\x1b[7~"), "home"),
    **dict.fromkeys((b"\x1b[F", b"\x1bOF", b"\x1b[4~", b"\x1b[8~"), "end"),
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x0c": "redraw",  # Ctrl-L
}
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[@-~])")
_BEGUN = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?")
ESCAPE = "escape"


class KeyReader:
    """Splits the bytes that a terminal sends into keys. A sequence may come in parts."""

    def __init__(self) -> None:
        self._rest = b""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_open(self) -> bool:
        """Whether an escape sequence has begun: more bytes follow at once, or it was the Escape key."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the names of the keys; a printable character is its own name. Unknown keys are dropped."""
        data, self._rest = self._rest + data, b""
        keys = []
        while data:
            if sequence := _SEQUENCE.match(data):
                keys.append(_NAMES.get(sequence[0], ""))
                data = data[sequence.end() :]
            elif _BEGUN.fullmatch(data):
                self._rest = data
                break
            elif data.startswith(b"\x1b"):
                keys.append(ESCAPE)
                data = data[1:]
            else:
                keys.append(self._one(data[:1]))
                data = data[1:]
        return [key for key in keys if key]

    def flush(self) -> list[str]:
        """Return the key of a sequence that nothing has followed."""
        begun, self._rest = self._rest, b""
        return [ESCAPE] if begun else []

    def _one(self, byte: bytes) -> str:
        if named := _NAMES.get(byte):
            return named
        text = self._text.decode(byte)
        return text if text.isprintable() else ""
