"""The record of a run in etcd, through the JSON gateway of its v3 interface (etcd 3.4 or later).

The record is one key. A transaction replaces it if its modification revision is the one that was read:
https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/. Reads are linearizable, which is etcd's default.
"""

import base64
import ssl
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from deadpool_run.agent.authority.claim import AuthorityRecord, from_json, name_of, to_json
from deadpool_run.agent.authority.json_http import HttpServer, checked
from deadpool_run.agent.authority.record_authority import RecordAuthority
from deadpool_run.errors import UsageError

_DEFAULT_PREFIX = "deadpool-run"
_DEFAULT_PORT = 2379


class EtcdAuthority(RecordAuthority[int]):
    """A run's record in etcd. The version is the key's modification revision, 0 before the first."""

    def __init__(self, servers: Sequence[HttpServer], prefix: str, run_id: str, user: str, password: str) -> None:
        """`user` and `password` are those of etcd; without a user, there is no login."""
        scheme = "etcd" if servers[0].tls is None else "etcds"
        self.where = f"{scheme}://{','.join(map(str, servers))}/{prefix}"
        self.advice = (
            "check that etcd answers on this machine (`etcdctl endpoint health`)\n"
            "user and certificates: ETCDCTL_USER, ETCDCTL_PASSWORD, ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY"
        )
        self._servers = servers
        self._key = _encoded(f"{prefix}/{name_of(run_id)}")
        self._login = {"name": user, "password": password} if user else None
        self._first = 0
        """Index of the server to ask first: the last one that answered, or the one after the last that did not."""

    def fetch(self) -> tuple[AuthorityRecord, int]:
        """Return the record and its revision."""
        found = self._ask("/v3/kv/range", {"key": self._key}).get("kvs", [])
        if not found:
            return AuthorityRecord(), 0
        text = base64.b64decode(found[0].get("value", "")).decode()
        return from_json(text, AuthorityRecord), int(found[0]["mod_revision"])

    def swap(self, record: AuthorityRecord, version: int) -> bool:
        """Replace the record of this revision; return whether it was the newest."""
        compare = {"key": self._key, "target": "MOD", "result": "EQUAL", "mod_revision": str(version)}
        put = {"requestPut": {"key": self._key, "value": _encoded(to_json(record))}}
        return bool(self._ask("/v3/kv/txn", {"compare": [compare], "success": [put]}).get("succeeded", False))

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the first server that gives one. Raises OSError."""
        failures = []
        for place in range(self._first, self._first + len(self._servers)):
            server = self._servers[place % len(self._servers)]
            try:
                return self._ask_one(server, path, body)
            except OSError as error:
                failures.append(f"{server}: {error}")
                self._first = (place + 1) % len(self._servers)
        raise ConnectionError("; ".join(failures))

    def _ask_one(self, server: HttpServer, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {}
        if self._login is not None:
            granted = checked(server.ask("POST", "/v3/auth/authenticate", self._login, {}))
            headers["Authorization"] = str(granted["token"])
        return checked(server.ask("POST", path, body, headers))


def parse(text: str, run_id: str, environment: Mapping[str, str], *, tls: bool) -> EtcdAuthority:
    """Return the authority at `//HOST[:PORT][,HOST...][/PREFIX]`. Raises `UsageError`."""
    places, _, prefix = text.removeprefix("//").partition("/")
    context = _tls(environment) if tls else None
    servers = [server for word in places.split(",") if (server := _server(word, context)) is not None]
    if not text.startswith("//") or len(servers) < len(places.split(",")):
        raise UsageError(
            "not addresses of etcd\nwrite etcd://HOST:PORT[,HOST:PORT...][/PREFIX], with etcds:// for TLS, and user and "
            "password in ETCDCTL_USER and ETCDCTL_PASSWORD"
        )
    user, _, password = environment.get("ETCDCTL_USER", "").partition(":")  # NAME or NAME:PASSWORD
    password = environment.get("ETCDCTL_PASSWORD") or password
    return EtcdAuthority(servers, prefix.strip("/") or _DEFAULT_PREFIX, run_id, user, password)


def _server(text: str, tls: ssl.SSLContext | None) -> HttpServer | None:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or port == 0 or parts.username is not None or parts.netloc != text:
        return None
    return HttpServer(host, port or _DEFAULT_PORT, tls)


def _tls(environment: Mapping[str, str]) -> ssl.SSLContext:
    """Return the certificates by which etcd and we prove our identity. Raises `UsageError`."""
    ca, cert, key = (environment.get(f"ETCDCTL_{name}") or None for name in ("CACERT", "CERT", "KEY"))
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise UsageError(
            f"the certificates of etcd cannot be read: {error}\n"
            "set ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY to PEM files, or unset them"
        ) from error
    return context


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
