"""HTTP server for the metrics of a run, in the running loop. It answers `GET /metrics` only.

The agent's event loop answers requests between other events, so no thread reads the agent's state. A client gets numbers and
names of the run and cannot change anything.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from deadpool_run.agent.console import installed_version, tell
from deadpool_run.agent.observers.metrics import RepairTimes, families
from deadpool_run.agent.tasks import Tasks
from deadpool_run.core.effects import Incident
from deadpool_run.vault.status_page import StatusPage

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_ASK_S = 5.0
"""Time limit for reading a request and sending its answer."""
_MAX_REQUEST = 8 << 10
_MAX_CONNECTIONS = 16


class _Collector(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class MetricsServer:
    """The metrics server of one leader. If it cannot listen, it prints a warning, and the job continues."""

    def __init__(self, address: tuple[str, int], ask: Ask, page: Callable[[], StatusPage]) -> None:
        """Listen. `ask` answers requests as `coordinator.requests` lists them."""
        host, port = address
        self._ask, self._page = ask, page
        self._repairs = RepairTimes()
        self._version = installed_version("deadpool-run")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self._collect))
        self._connections = 0
        self._server: asyncio.Server | None = None
        self.port: int | None = None
        """The port that the server listens on; None if it cannot listen."""
        self._tasks = Tasks(lambda error: tell(f"metrics: {error!r}", level="warning"))
        try:
            family = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICHOST
            )[0]
            listener = socket.create_server(family[4][:2], family=family[0])
        except OSError as error:
            tell(f"no metrics: cannot listen on {host}:{port}: {error.strerror} (the job continues)", level="warning")
            return
        self._tasks.start(self._serve(listener))
        at, self.port = listener.getsockname()[:2]
        tell(
            f"metrics at http://{f'[{at}]' if ':' in at else at}:{self.port}/metrics",
            event="metrics_served",
            port=self.port,
        )

    async def _serve(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._answer, sock=listener, limit=_MAX_REQUEST)

    def repaired(self, incident: Incident) -> None:
        """Count a repair."""
        self._repairs.add(incident)

    def _collect(self) -> Iterable[Metric]:
        return families(self._ask({"do": "status"}), self._page(), self._repairs, self._version)

    def close(self) -> None:
        """Stop serving."""
        self._tasks.cancel()
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            async with asyncio.timeout(_ASK_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(request))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # the client is slow, has disconnected, or does not speak HTTP
        except asyncio.CancelledError:
            pass  # closed; before Python 3.12, asyncio's streams report it to the loop as an error
        except Exception as error:  # noqa: BLE001 - a request must not end the job
            tell(f"metrics: a request failed: {error!r}", level="warning")
        finally:
            self._connections -= 1
            writer.close()

    def _response(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        if self._connections > _MAX_CONNECTIONS:
            return _response("503 Service Unavailable", b"too many connections\n")
        if method not in {b"GET", b"HEAD"}:
            return _response("405 Method Not Allowed", b"only GET\n")
        if target != b"/metrics":
            return _response("404 Not Found", b"metrics are at /metrics\n")
        body = generate_latest(self._registry)
        return _response("200 OK", body, CONTENT_TYPE_LATEST, with_body=method == b"GET")


def _response(status: str, body: bytes, kind: str = "text/plain; charset=utf-8", *, with_body: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (body if with_body else b"")
