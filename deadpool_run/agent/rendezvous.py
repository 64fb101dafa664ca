"""How an agent finds the job that it belongs to, or founds it. Addresses are exchanged as IP literals, found once by name."""

import asyncio
import errno
import socket
import time
from dataclasses import dataclass
from typing import Any

from deadpool_run.agent.spec import Cluster
from deadpool_run.agent.store import family_of
from deadpool_run.agent.tell import tell
from deadpool_run.coordinator import handshake
from deadpool_run.errors import UsageError
from deadpool_run.wire.auth import WRONG_TOKEN, RefusedError, Role

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_SAY_AFTER_S = 10.0
"""Whoever is waited for longer than this is named to the user."""
_REFUSALS = 3
"""So many times in a row a machine that is up says that nobody listens there, before the job is taken for ended."""


@dataclass(frozen=True, slots=True)
class Founder:
    """Nobody leads the job yet: we do, at this address."""

    address: str
    listener: socket.socket


@dataclass(frozen=True, slots=True)
class Found:
    """The job is led elsewhere: an authenticated connection to there, and where others will reach us."""

    sock: socket.socket
    address: str
    listener: socket.socket


@dataclass(frozen=True, slots=True)
class Over:
    """There is no job any more, or we are not to look for it any longer."""

    exit_code: int
    reason: str


async def find(
    cluster: Cluster, stop: asyncio.Future[tuple[int, str]], *, may_found: bool, timeout_s: float
) -> Founder | Found | Over:
    """Return what there is. Who was in the job before does not found another, and waits while somebody may lead it.

    Raises `UsageError` if the tokens are not the same, or no endpoint can be looked up.
    """
    loop = asyncio.get_running_loop()
    began, pause, told, refusals = time.monotonic(), _FIRST_PAUSE_S, False, 0
    while True:
        error: OSError | None = None
        for host, port in cluster.endpoints:
            address = await loop.run_in_executor(None, _look_up, host, port)
            if may_found and (host, port) == cluster.endpoints[0] and (listener := _bind(address, port)) is not None:
                return Founder(address, listener)
            try:
                sock = await loop.run_in_executor(None, _dial, address, port, cluster.token)
            except OSError as failure:
                error = failure
                continue
            ours = str(sock.getsockname()[0])
            return Found(sock, ours, _listen_anywhere(ours))
        refusals = refusals + 1 if error is not None and error.errno == errno.ECONNREFUSED else 0
        if not may_found and refusals >= _REFUSALS:
            return Over(1, "nobody leads the job any more: it has ended, or its coordinator's node is lost")
        if time.monotonic() - began > timeout_s:
            return Over(1, f"nobody at {_names(cluster)} has taken this node in within {timeout_s:g} s ({error})")
        if not told and time.monotonic() - began > _SAY_AFTER_S:
            told = True
            tell(f"waiting for the job's first node at {_names(cluster)} ({error})")
        done, _ = await asyncio.wait({stop}, timeout=pause)
        if done:
            return Over(*stop.result())
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def dial_member(address: str, port: int, token: bytes) -> socket.socket:
    """Return a connection to a coordinator that has our token. Blocking; raises OSError."""
    try:
        return handshake.dial(address, port, Role.MEMBER, token)
    except RefusedError as error:
        raise ConnectionRefusedError(errno.ECONNREFUSED, str(error)) from error


def dial_vault(address: str, port: int, token: bytes) -> socket.socket:
    """Return a connection for copies of snapshots. Blocking; raises OSError."""
    try:
        return handshake.dial(address, port, Role.VAULT, token)
    except RefusedError as error:
        raise ConnectionRefusedError(errno.ECONNREFUSED, str(error)) from error


def _dial(address: str, port: int, token: bytes) -> socket.socket:
    try:
        return handshake.dial(address, port, Role.MEMBER, token)
    except RefusedError as error:
        advice = (
            "give all nodes the same: DEADPOOL_TOKEN, or --token-file"
            if str(error) == WRONG_TOKEN
            else "is another program listening there? --rdzv-endpoint names another port"
        )
        raise UsageError(f"{address}:{port} refused this node: {error}\n{advice}") from error


def _look_up(host: str, port: int) -> str:
    """Return the address of a host, as an IP literal. Blocking."""
    try:
        found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter: no name could be like that
        why = (isinstance(error, OSError) and error.strerror) or "not a host's name"
        raise UsageError(f"--rdzv-endpoint {host}:{port}: {why}\nwrite an address instead of a name") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def _bind(address: str, port: int) -> socket.socket | None:
    """Return a socket bound there; None if the address is another machine's, or the port is in use."""
    sock = socket.socket(family_of(address), socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
        sock.listen()
    except OSError as error:
        sock.close()
        if error.errno in {errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
            return None
        raise UsageError(f"--rdzv-endpoint {address}:{port}: {error.strerror}\nchoose another port") from error
    return sock


def _listen_anywhere(address: str) -> socket.socket:
    sock = socket.socket(family_of(address), socket.SOCK_STREAM)
    sock.bind((address, 0))
    return sock


def _names(cluster: Cluster) -> str:
    return ", ".join(f"{host}:{port}" for host, port in cluster.endpoints)
