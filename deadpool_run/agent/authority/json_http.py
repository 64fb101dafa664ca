"""Requests of JSON over HTTP or HTTPS, one connection for each. Environment variables for proxies are not read."""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.typed import parse

REQUEST_TIMEOUT_S = 2.0
"""For connecting, and for each part of the answer."""
_MAX_BYTES = 1 << 20
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server's address. `tls`: None for plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer. An answer that is no JSON object becomes its `message`. Raises OSError."""
        if self.tls is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        else:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S, context=self.tls)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            text = response.read(_MAX_BYTES)
        except http.client.HTTPException as error:
            raise ConnectionError(f"not an answer in HTTP: {error!r}") from error
        finally:
            connection.close()
        try:
            answer = parse(text)
        except ProtocolError:
            answer = None
        if not isinstance(answer, dict):
            answer = {"message": text[:_MAX_SHOWN].decode(errors="replace").strip()}
        return response.status, answer


def checked(answer: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a successful answer. Raises OSError for any other."""
    status, content = answer
    if status not in {HTTPStatus.OK, HTTPStatus.CREATED}:
        raise ConnectionError(f"HTTP {status}, {content.get('message') or content.get('error') or 'no reason given'}")
    return content
