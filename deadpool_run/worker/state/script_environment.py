"""The environment variables that a script changes in its loop. Those of deadpool-run are its own: they differ between processes."""

import os
from collections.abc import Mapping

_OURS = b"DEADPOOL_"


class ScriptEnvironment:
    """The variables that the script has changed since `begin`."""

    def __init__(self) -> None:
        self._at_begin: dict[bytes, bytes] = {}

    def begin(self) -> None:
        """Note all variables, as the loop begins."""
        self._at_begin = dict(_present())

    def take(self) -> dict[str, str | None]:
        """Return the values of variables that have changed; None for one that is gone. Takes a microsecond if none has."""
        present = _present()
        if present == self._at_begin:
            return {}
        names = sorted(
            name
            for name in present.keys() | self._at_begin.keys()
            if not name.startswith(_OURS) and present.get(name) != self._at_begin.get(name)
        )
        return {os.fsdecode(name): _decoded(present.get(name)) for name in names}

    def put(self, changed: Mapping[str, str | None]) -> None:
        """Set all as they were at `take`; others as they were at `begin`."""
        for name in self.take().keys() | changed.keys():
            before = self._at_begin.get(os.fsencode(name))
            value = changed[name] if name in changed else _decoded(before)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _present() -> Mapping[bytes, bytes]:
    known = getattr(os.environ, "_data", None)  # asked in each step: a look through `os.environb` takes longer
    return known if isinstance(known, dict) else dict(os.environb)


def _decoded(value: bytes | None) -> str | None:
    return None if value is None else os.fsdecode(value)
