"""The control socket: requests of viewers and `kill-rank` to a live run.

A UNIX stream socket, `control.sock` in the run directory (mode 0600 in a directory of mode 0700). A peer of another user is
refused. Each request and each answer is a JSON object on one line. A connection may send several requests:

    {"do": "status"}                                  -> the status object
    {"do": "watch", "every_s": 1.0}                   -> status objects, one a line: at once, after each decision of the
                                                         coordinator (at most 10 a second) and at least each `every_s`, unless
                                                         to make it takes more than 1 % of a core's time
    {"do": "kill-rank", "rank": 1, "how": "sigkill"}  -> {"ok": true, "rank": 1, "worker": 4, "pid": 4711, "how": "sigkill"}
                                                         `how`: a `core.injection.KillHow` value. With --hang-timeout 0,
                                                         `force` must be true if the process lives on
    {"do": "kill-spare", "worker": 5, "how": "sigkill"} -> {"ok": true, "worker": 5, "how": "sigkill"}
    {"do": "slow-rank", "rank": 1, "factor": 3.0, "for_s": 60.0}
                                                      -> {"ok": true, "rank": 1, "worker": 4, "pid": 4711, "how": "slow:3 for 60 s"}
    {"do": "kill-agent", "node": "gpu07"}             -> {"ok": true, "ranks": [2, 3], "node": "gpu07"}: the node's agent gets SIGKILL
                                                         without `node`: that of the only one. Then `force` must be true
    {"do": "drain", "rank": 1}                        -> {"ok": true, "ranks": [1], "node": null}: the rank moves to a spare
    {"do": "drain", "node": "gpu07"}                  -> {"ok": true, "ranks": [2, 3], "node": "gpu07"}: every rank of the node does
    {"do": "drain", "here": true}                     -> the same for the node of the agent that is asked
    {"do": "stop"}                                    -> {"ok": true}: the job ends as if SIGTERM had come

The values of a request are text and numbers. The answer to a request that cannot be carried out is {"error": "<what is wrong>"}, and
the connection stays open. A line longer than `MAX_LINE_BYTES` closes it. A viewer can neither block nor fail the job.

The agent of a follower has such a socket too. It passes requests on to the leader, and its watchers get a status each `every_s` only.
`docs/status-schema.md` lists the fields of the status object.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_run.coordinator.address import SOCKET_NAME, control_address, peer_of
from deadpool_run.coordinator.requests import is_error
from deadpool_run.errors import ProtocolError, RequestRefusedError
from deadpool_run.wire.typed import Decoder, to_json

Answers = Callable[[Mapping[str, Any]], Awaitable[bytes]]
"""Returns the answer to a request, as a JSON object on one line."""

MAX_LINE_BYTES = 64 << 10
MAX_CONNECTIONS = 64
_MIN_EVERY_S = 0.1
_MAX_EVERY_S = 60.0
_LOG = logging.getLogger("deadpool_run")
_REQUESTS: Decoder[dict[str, str | int | float | bool | None]] = Decoder(
    dict[str, str | int | float | bool | None], "a request: a JSON object of text and numbers on one line"
)


class ControlServer:
    """Serves the control socket in the running loop."""

    def __init__(self, run_dir: Path, answer: Answers) -> None:
        """Prepare; `start` serves. `answer` runs in the running loop, and an exception of it ends the connection."""
        self._run_dir = run_dir
        self._answer = answer
        self._connections: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and listen. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # so that the socket never exists with another mode than 0600
        try:
            with control_address(self._run_dir) as address:
                listener.bind(address)
        finally:
            os.umask(before)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_LINE_BYTES)

    def notify(self) -> None:
        """Send watchers the status."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Close all connections and unlink the socket."""
        if self._server is not None:
            self._server.close()
            (self._run_dir / SOCKET_NAME).unlink(missing_ok=True)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if _peer_uid(writer) in (os.getuid(), 0) and len(self._connections) <= MAX_CONNECTIONS:
                await self._converse(reader, writer)
        except (ConnectionError, ValueError):
            pass  # the viewer went away, or sent a line over the limit
        except asyncio.CancelledError:
            pass  # closed; before Python 3.12, asyncio's streams report it to the loop as an error
        except Exception:  # noqa: BLE001 - a viewer must not end the job, whatever it asked for
            _LOG.exception("a request on the control socket failed, and its connection is closed")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                request = _REQUESTS.decode(line)
                if request.get("do") == "watch":
                    await self._watch(_every_s(request), reader, writer)
                    return
                answer = await self._answer(request)
            except (RequestRefusedError, ProtocolError) as refusal:
                answer = to_json({"error": str(refusal)})
            await _send(writer, answer)

    async def _watch(self, every_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the status until the viewer closes the connection."""
        hung_up = asyncio.ensure_future(reader.read())
        try:
            while not hung_up.done():
                news = self._changed  # taken first: a change while the status is sent is news too
                status = await self._answer({"do": "status"})
                if not is_error(status):  # an error is over soon, or the run ends
                    await _send(writer, status)
                changed = asyncio.ensure_future(news.wait())
                await asyncio.wait({hung_up}, timeout=_MIN_EVERY_S)  # the shortest time between two answers
                await asyncio.wait({hung_up, changed}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            hung_up.cancel()


def _every_s(request: Mapping[str, Any]) -> float:
    every_s = request.get("every_s", 1.0)
    if not isinstance(every_s, int | float) or every_s != every_s:  # noqa: PLR0124 - NaN; an integer may be too large for a float
        raise RequestRefusedError(f"every_s must be a number of seconds, not {every_s!r}")
    return float(min(max(every_s, _MIN_EVERY_S), _MAX_EVERY_S))


async def _send(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(answer + b"\n")
    await writer.drain()


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    _, uid = peer_of(writer.get_extra_info("socket"))
    return uid
