"""Client of the control socket: finds a live run and sends it requests."""

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deadpool_run.coordinator.address import POINTER_NAME, SOCKET_NAME, control_address, peer_of
from deadpool_run.errors import NoSuchRunError, ProtocolError, RequestRefusedError, UsageError
from deadpool_run.wire.typed import parse, read_object

ANSWER_S = 5.0
"""Timeout of an answer. A live agent answers in milliseconds."""
_MAX_CANDIDATES = 200
_NAMES_SHOWN = 5


class ControlClient(contextlib.AbstractContextManager["ControlClient"]):
    """A connection to one run; a context manager. Every method raises `NoSuchRunError` if the run has ended."""

    def __init__(self, run_dir: Path) -> None:
        """Connect."""
        self.run_dir = run_dir
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(ANSWER_S)
        try:
            with control_address(run_dir) as address:
                self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise NoSuchRunError(_why_not(run_dir, error)) from error
        self._answers = self._socket.makefile("rb")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._answers.close()
        self._socket.close()

    def hang_up(self) -> None:
        """End the conversation, also one that another thread waits in."""
        with contextlib.suppress(OSError):  # the run has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def agent(self) -> int:
        """Return a pidfd of the agent, which the caller closes."""
        pid, _ = peer_of(self._socket)
        return os.pidfd_open(pid)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one request. Raises `RequestRefusedError`, `ProtocolError`."""
        self._send(request)
        return self._receive()

    def watch(self, every_s: float) -> Iterator[dict[str, Any]]:
        """Yield a status now, after each change and at least every `every_s`, until the run ends."""
        self._send({"do": "watch", "every_s": every_s})
        self._socket.settimeout(ANSWER_S + every_s)
        while True:
            try:
                yield self._receive()
            except NoSuchRunError:
                return

    def _send(self, request: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise NoSuchRunError(_why_not(self.run_dir, error)) from error

    def _receive(self) -> dict[str, Any]:
        try:
            line = self._answers.readline()
        except OSError as error:
            raise NoSuchRunError(_why_not(self.run_dir, error)) from error
        if not line.endswith(b"\n"):
            raise NoSuchRunError(f"{self.run_dir}: the run has ended\n`deadpool-run ls` lists the runs of this machine")
        try:
            answer = parse(line)
        except ProtocolError as error:
            raise ProtocolError(f"{self.run_dir}: bad answer {line[:80]!r}") from error
        if not isinstance(answer, dict):
            raise ProtocolError(f"{self.run_dir}: bad answer {line[:80]!r}")
        if "error" in answer:
            raise RequestRefusedError(str(answer["error"]))
        return answer


def connect(run_dir: Path | None, state_dir: Path) -> ControlClient:
    """Connect to the run of this directory, or to the only live one below `state_dir`.

    Raises `NoSuchRunError`, and `UsageError` if several are live.
    """
    if run_dir is None:
        return _only_live(state_dir)
    try:
        return ControlClient(run_dir)
    except NoSuchRunError:
        leader = read_object(run_dir / POINTER_NAME).get("run_dir")
        others = ([Path(leader)] if isinstance(leader, str) else []) + _newest(run_dir.glob(f"node-*/{SOCKET_NAME}"))
        found = _first_live(others)
        if found is None:
            raise
        return found


def _only_live(state_dir: Path) -> ControlClient:
    sockets = _newest((*state_dir.glob(f"*/{SOCKET_NAME}"), *state_dir.glob(f"*/node-*/{SOCKET_NAME}")))
    runs: dict[str, list[Path]] = {}
    for path in sockets:
        runs.setdefault(path.relative_to(state_dir).parts[0], []).append(path)
    live = {name: found for name, paths in runs.items() if (found := _first_live(paths)) is not None}
    if not live:
        raise NoSuchRunError(
            f"no live run below {state_dir}\nif it was started with --run-dir, add the same option here"
        )
    if len(live) > 1:
        for client in live.values():
            client.close()
        names = ", ".join(sorted(live)[:_NAMES_SHOWN])
        raise UsageError(f"{len(live)} runs are live: {names}\nchoose one with --run-id")
    return next(iter(live.values()))


def _first_live(candidates: Iterable[Path]) -> ControlClient | None:
    for candidate in candidates:
        with contextlib.suppress(NoSuchRunError):  # a killed agent does not remove its socket
            return ControlClient(candidate)
    return None


def _newest(sockets: Iterable[Path]) -> list[Path]:
    """Return the run directories of these control sockets, newest first."""
    born: list[tuple[float, Path]] = []
    for control in sockets:
        try:
            born.append((control.lstat().st_mtime, control.parent))
        except FileNotFoundError:
            continue  # it has just ended
    return [path for _, path in sorted(born, reverse=True)[:_MAX_CANDIDATES]]


def _why_not(run_dir: Path, error: OSError) -> str:
    match error:
        case FileNotFoundError():
            why = "no run has its control socket here" if run_dir.is_dir() else "no such directory"
        case ConnectionRefusedError():
            why = f"the run has ended: its agent ({_agent(run_dir)}) is gone"
        case TimeoutError():
            why = f"the agent ({_agent(run_dir)}) did not answer within {ANSWER_S:g} s"
        case ConnectionError():
            why = "the run has ended"
        case _:
            why = error.strerror or str(error)
    return f"{run_dir}: {why}\n`deadpool-run ls` lists the runs of this machine"


def _agent(run_dir: Path) -> str:
    return f"pid {read_object(run_dir / 'run.json').get('pid', 'unknown')}"
