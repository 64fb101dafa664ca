"""Rendezvous: how an agent finds its job, or founds it. Names are resolved once; agents exchange IP literals."""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from deadpool_run.agent.authority.bounded import BoundedAuthority
from deadpool_run.agent.authority.claim import LeaderClaim
from deadpool_run.agent.console import tell
from deadpool_run.agent.processes.store import family_of
from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.agent.rendezvous.earlier_run import EarlierRun
from deadpool_run.agent.rendezvous.shared_folder import SharedFolder
from deadpool_run.agent.spec import Cluster
from deadpool_run.core.settings import Settings
from deadpool_run.errors import AuthorityError, UsageError
from deadpool_run.ids import first_id
from deadpool_run.transport import handshake
from deadpool_run.wire.auth import WRONG_TOKEN, ConnectionRole, Credentials, GreetingRefusedError
from deadpool_run.wire.peer_connection import PeerConnection

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_REPORT_AFTER_S = 10.0
"""After this wait the log names what the agent waits for."""
_PROBE_S = 1.0
"""How long a rejoining node probes each agent that it knew."""
_DOUBT_S = 15.0
"""How long a founding node asks an endpoint again that does not answer: its agent may be busy, or the link not up yet."""
_MAX_PROBED = 5
"""Known agents that a rejoining node probes: more would take long, and few can fail without losing the majority."""
_REFUSALS = 3
"""Refused connections in a row, by a machine that is up, after which the job counts as ended."""
_ABANDONED_S, _ABANDONED_TIMEOUTS = 15.0, 4.0
"""After this time a takeover would be over: in seconds, and in node timeouts. The longer counts."""


@dataclass(frozen=True, slots=True)
class Founder:
    """The job has no leader yet: this node founds it, at this address."""

    address: str
    listener: socket.socket
    term: int = 0
    """Larger than 0 if the job was founded before, and ended to be started again."""


@dataclass(frozen=True, slots=True)
class Found:
    """Another node leads the job: an authenticated connection to it, and the address where others reach this node."""

    connection: PeerConnection
    address: str
    listener: socket.socket


@dataclass(frozen=True, slots=True)
class Over:
    """The search is over without a job: it has ended, or the time is over."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Former:
    """The job that a node was in, as far as the node knows it."""

    run_id: str = ""
    listened: tuple[str, int] | None = None
    """Where it listened itself."""
    agents: Sequence[tuple[str, int]] = ()
    """Where the others listened. Each of them redirects to the leader."""


async def find(  # noqa: PLR0913 - what the agent knows of its job
    cluster: Cluster,
    stop: asyncio.Future[tuple[int, str]],
    *,
    settings: Settings,
    former: Former | None = None,
    base: Path | None = None,
    earlier: EarlierRun | None = None,
) -> Founder | Found | Over:
    """Find or found the job. A node that was in the job before (`former`) may not found another: it waits for a leader.

    `base` is the run's directory, which has a leader file if the disk is shared. An `earlier` run that may live is joined if an
    agent of it answers. Raises `UsageError` if one is silent and this node would found another, if the tokens differ, or if no
    endpoint can be resolved, and `AuthorityError` if the external authority cannot be asked.
    """
    search = _Search(cluster, settings.node_timeout_s, base, former, earlier)
    timeout_s = settings.join_timeout_s
    began, pause, reported = time.monotonic(), _FIRST_PAUSE_S, False
    while True:
        try:
            tried = await asyncio.to_thread(search.once)
        except AuthorityError as error:
            if former is None:
                raise
            tried = OSError(str(error).partition("\n")[0])  # this node was in the job: it may answer later
        if isinstance(tried, Founder | Found | Over):
            return tried
        if time.monotonic() - began > timeout_s:
            return Over(1, f"no leader at {search.where} admitted this node within {timeout_s:g} s ({tried})")
        if not reported and time.monotonic() - began > _REPORT_AFTER_S:
            reported = True
            tell(f"waiting for the job's first node at {search.where} ({tried})")
        done, _ = await asyncio.wait({stop}, timeout=pause)
        if done:
            return Over(*stop.result())
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class _Search:
    """Searches the endpoints of the user or the scheduler; without any, only the authority's record names an address."""

    def __init__(
        self,
        cluster: Cluster,
        node_timeout_s: float,
        base: Path | None,
        former: Former | None,
        earlier: EarlierRun | None,
    ) -> None:
        self._cluster = cluster
        self._earlier = earlier
        self._may_found = former is None
        self._former = former or Former()
        self._credentials = Credentials(cluster.token, cluster.node_name, self._former.run_id)
        self._base = base
        self._began = time.monotonic()
        self._failure = OSError("no endpoint")
        self._silent: OSError | None = None
        authority = cluster.authority
        self._record = None if authority is None else _Record(cluster, authority, node_timeout_s)
        self._refusals = 0
        endpoints = ", ".join(f"{host}:{port}" for host, port in cluster.endpoints)
        self.where = endpoints if authority is None else endpoints or authority.where

    def once(self) -> Founder | Found | Over | OSError:
        """Search, or found the job; return why neither was possible. Blocks."""
        if (found := self._at_known_agents()) is not None:
            return found
        return self._at_endpoints() if self._cluster.endpoints else self._by_record()

    def _at_known_agents(self) -> Found | None:
        credentials, agents = self._credentials, self._former.agents
        if self._earlier is not None and self._is_in_doubt():
            credentials, agents = replace(credentials, run_id=self._earlier.run_id), self._earlier.agents
            self._silent = None
        for address, port in agents[:_MAX_PROBED]:
            try:
                return _found(dial(ConnectionRole.MEMBER, address, port, credentials, _PROBE_S), self._cluster)
            except OSError as failure:
                self._failure = failure
                self._silent = self._silent if failure.errno == errno.ECONNREFUSED else failure
        return None

    def _by_record(self) -> Founder | Found | Over | OSError:
        assert self._record is not None
        found = self._record.find()
        if found is not None:
            return found
        if not self._may_found:
            return OSError("the run has no leader now")
        address = own_address()
        listener = _bind(address, 0)
        assert listener is not None, "the address is this node's, and any port will do"
        return self._record.claim(Founder(address, listener))

    def _at_endpoints(self) -> Founder | Found | Over | OSError:
        founder: Founder | None = None
        error = self._failure
        unknown: list[UsageError] = []
        for place, (host, port) in enumerate(self._cluster.endpoints):
            try:
                address = _for_others(host, _look_up(host, port))
            except UsageError as nameless:
                unknown.append(nameless)
                continue
            if founder is not None and (address, port) == founder.listener.getsockname()[:2]:
                continue  # another name of this node
            founds = place == 0 and self._may_found and self._cluster.founds
            if founds and (listener := _bind(address, port)) is not None:
                founder = Founder(address, listener)
                continue  # unless another endpoint leads the job already
            try:
                connection = self._dial(address, port)
            except OSError as failure:
                if founder is not None and failure.errno != errno.ECONNREFUSED and self._is_in_doubt():
                    founder.listener.close()
                    return failure
                if (address, port) != self._former.listened:  # nobody listens there since this node left the job
                    error = failure
                continue
            if founder is not None:
                founder.listener.close()
            return _found(connection, self._cluster)
        if len(unknown) == len(self._cluster.endpoints):
            raise unknown[0]
        return self._find_successor(error) if founder is None else self._found(founder)

    def _dial(self, address: str, port: int) -> PeerConnection:
        if self._may_found:
            return _dial_or_advise(address, port, self._credentials, handshake.TIMEOUT_S)
        return dial(ConnectionRole.MEMBER, address, port, self._credentials)  # another job may have the port now

    def _is_in_doubt(self) -> bool:
        return time.monotonic() < self._began + _DOUBT_S

    def _found(self, founder: Founder) -> Founder | Found | Over | OSError:
        """Found the job, unless the authority knows of it, or an agent of an earlier one is silent, and may live."""
        if self._record is None:
            if self._earlier is None or self._silent is None:
                return founder
            founder.listener.close()
            if self._is_in_doubt():
                return self._silent
            raise UsageError(self._earlier.refusal)
        try:
            found = self._record.find(founder.listener.getsockname()[:2])
            if found is None:
                return self._record.claim(founder)
        except AuthorityError:
            founder.listener.close()
            raise
        founder.listener.close()
        return found

    def _find_successor(self, error: OSError) -> Found | Over | OSError:
        """Look for a later leader by the leader file and the known agents; judge what it means if there is none."""
        later = None if self._base is None else leader_file.read(self._base)
        if later is not None:
            try:
                connection = dial(ConnectionRole.MEMBER, later.address, later.port, self._credentials)
                return _found(connection, self._cluster)
            except OSError as failure:
                error = failure
        if self._record is not None and (found := self._record.find()) is not None and not isinstance(found, OSError):
            return found
        self._refusals = self._refusals + 1 if error.errno == errno.ECONNREFUSED else 0
        if not self._may_found and self._refusals >= _REFUSALS:
            return Over(1, "no leader is reachable: the job has ended, or its leader's node failed")
        return error


class _Record:
    """Finds or founds the run by the external authority's record. Methods block; they raise `AuthorityError`."""

    def __init__(self, cluster: Cluster, authority: BoundedAuthority, node_timeout_s: float) -> None:
        self._authority = authority
        self._cluster = cluster
        self._last: LeaderClaim | None = None
        self._refused: tuple[LeaderClaim, float] | None = None
        self._patience_s = max(_ABANDONED_S, _ABANDONED_TIMEOUTS * node_timeout_s)
        if cluster.meeting is not None:
            SharedFolder(cluster.meeting)  # it is there from now on

    def find(self, mine: tuple[str, int] | None = None) -> Found | Over | OSError | None:
        """Return a connection to the leader, or why there is none; None if this node may found the run.

        `mine` is where this node listens: a leader that is recorded at this address has ended.
        """
        record = self._authority.read()
        if record.end is not None:
            return Over(record.end.exit_code, f"this run is over: {record.end.reason}")
        self._last = leader = record.claim
        if leader is None or not leader.port:
            return None
        try:
            if (leader.address, leader.port) == mine:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "the leader that is recorded ran here, and has ended")
            connection = dial(ConnectionRole.MEMBER, leader.address, leader.port, searcher(self._cluster))
            return _found(connection, self._cluster)
        except OSError as failure:
            return None if self._is_abandoned(leader, failure) else failure

    def claim(self, founder: Founder) -> Founder | OSError:
        """Found the run there, unless another node was faster."""
        term = 0 if self._last is None else self._last.term + 1
        node, port = first_id(self._cluster.node_name, term), founder.listener.getsockname()[1]
        if self._authority.claim(LeaderClaim(term, node, founder.address, port, self._authority.run_id)):
            return replace(founder, term=term)
        founder.listener.close()
        return OSError("another node founded the run first")

    def _is_abandoned(self, leader: LeaderClaim, failure: OSError) -> bool:
        """Return whether the leader's machine has refused connections for longer than any takeover takes.

        A silent machine may be cut off from this node only: to found the job again would take replacements from it.
        """
        if failure.errno != errno.ECONNREFUSED:
            self._refused = None
            return False
        if self._refused is None or self._refused[0] != leader:
            self._refused = (leader, time.monotonic())
        return time.monotonic() - self._refused[1] > self._patience_s


def own_address() -> str:
    """Return the address by which other machines reach this one: of its name, else of its default route.

    The route is looked up in the kernel; nothing is sent (the address is one of RFC 5737's, for documentation).
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        if not ip_address(named := str(found[0][4][0])).is_loopback:
            return named
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("198.51.100.1", 9))
        return str(sock.getsockname()[0])
    return "127.0.0.1"


def _for_others(host: str, address: str) -> str:
    """Return an address that others can use too: some systems resolve their own name to the loopback interface."""
    is_own_name = host not in {address, "localhost"} and ip_address(address).is_loopback
    return own_address() if is_own_name else address


async def redirect(cluster: Cluster, address: str, port: int) -> Found | None:
    """Return a connection to the leader that another agent named; None if it does not answer."""
    with contextlib.suppress(OSError):
        return await asyncio.to_thread(
            lambda: _found(_dial_or_advise(address, port, searcher(cluster), handshake.TIMEOUT_S), cluster)
        )
    return None


def searcher(cluster: Cluster) -> Credentials:
    """Return what a node proves that is in no run yet."""
    return Credentials(cluster.token, cluster.node_name)


def _found(connection: PeerConnection, cluster: Cluster) -> Found:
    """Return the connection, and a bound port: that of an endpoint on this machine if there is one, where others look."""
    ours = str(connection.sock.getsockname()[0])
    mine = [port for host, port in cluster.endpoints if _is_at(host, port, ours)]
    return Found(connection, ours, next(filter(None, (_bind(ours, port) for port in (*mine, 0)))))


def _is_at(host: str, port: int, address: str) -> bool:
    with contextlib.suppress(UsageError):
        return _look_up(host, port) == address
    return False


def dial(
    role: ConnectionRole, address: str, port: int, credentials: Credentials, timeout_s: float = handshake.TIMEOUT_S
) -> PeerConnection:
    """Return an authenticated connection to an agent, for this purpose. Blocking; raises OSError."""
    try:
        return handshake.dial(address, port, role, credentials, timeout_s)
    except GreetingRefusedError as error:
        raise ConnectionRefusedError(errno.ECONNREFUSED, str(error)) from error


def _dial_or_advise(address: str, port: int, credentials: Credentials, timeout_s: float) -> PeerConnection:
    try:
        return handshake.dial(address, port, ConnectionRole.MEMBER, credentials, timeout_s)
    except GreetingRefusedError as error:
        advice = (
            "give all nodes the same: DEADPOOL_TOKEN, or --token-file"
            if str(error) == WRONG_TOKEN
            else "another program may listen there: --rdzv-endpoint names another port"
        )
        raise UsageError(f"{address}:{port} refused this node: {error}\n{advice}") from error


def _look_up(host: str, port: int) -> str:
    """Return the address of a host, as an IP literal. Blocking."""
    try:
        found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter: not a valid name
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
