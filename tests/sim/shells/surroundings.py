"""Replacements for the kernel around the agents of a simulated job, installed during a block."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from network import Machine, SimSocket, Sockets
from pretended import SimControl, SimNode, SimStore
from shell_job import PORT, Job, SimLeader, SimParticipation, SimServer

from deadpool_run.agent import agent as agent_module
from deadpool_run.agent import console
from deadpool_run.agent.cluster import leader as leader_module
from deadpool_run.agent.cluster import participation
from deadpool_run.agent.rendezvous import rendezvous
from deadpool_run.agent.rendezvous.earlier_run import EarlierRun
from deadpool_run.agent.spec import Cluster
from deadpool_run.core.settings import Settings
from deadpool_run.transport import handshake
from deadpool_run.transport.message_stream import MessageStream
from deadpool_run.wire.auth import ConnectionRole, GreetingRefusedError


async def _find(
    cluster: Cluster,
    stop: asyncio.Future[tuple[int, str]],
    *,
    settings: Settings,
    former: rendezvous.Former | None = None,
    base: Path | None = None,  # there is no shared disk
    earlier: EarlierRun | None = None,  # nor a disk that outlives a machine
) -> Any:
    """A stand-in for the search, which uses threads: dial every machine in turn. Only the first machine founds the job."""
    loop: Any = asyncio.get_running_loop()
    machine, job = loop.machine, loop.agent.job
    began, pause_s = loop.time(), 0.05
    while loop.time() < began + settings.join_timeout_s:
        for address, port in dict.fromkeys([*cluster.endpoints, *(former.agents if former else ())]):
            if address != machine.address and (found := await _reach(cluster, address, port)) is not None:
                return found
        if former is None and not job.founded and machine.address == cluster.endpoints[0][0]:
            job.founded = True
            return rendezvous.Founder(machine.address, _listener(job, machine))
        done, _ = await asyncio.wait({stop}, timeout=pause_s)
        if done:
            return rendezvous.Over(*stop.result())
        pause_s = min(2 * pause_s, 1.0)
    return rendezvous.Over(1, "no leader admitted this node")


async def _reach(cluster: Cluster, address: str, port: int) -> Any:
    """Stand for `rendezvous.redirect`."""
    loop: Any = asyncio.get_running_loop()
    try:
        connection = await handshake.connect(address, port, ConnectionRole.MEMBER, rendezvous.searcher(cluster), 1.0)
    except (OSError, GreetingRefusedError):
        return None
    return rendezvous.Found(connection, loop.machine.address, _listener(loop.agent.job, loop.machine))


def _listener(job: Job, machine: Machine) -> SimSocket:
    sock = SimSocket(job.network, machine)
    if PORT not in machine.listeners:
        sock.local = (machine.address, PORT)
    sock.listen()
    return sock


async def _gone(processes: Any, timeout_s: float) -> None:
    loop: Any = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while any(each.alive for each in processes) and loop.time() < until:  # noqa: ASYNC110 - their end is no event of asyncio
        await asyncio.sleep(0.02)


@contextmanager
def simulated(seed: int, machines: int, settings: Settings, kind: type[Job] = Job) -> Iterator[Job]:
    """Yield a job on simulated machines, and free it at the end."""
    before = random.getstate()
    random.seed(seed)
    folder = Path(tempfile.mkdtemp(prefix="shells-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    with pytest.MonkeyPatch.context() as patch:
        job = kind(seed, machines, settings, folder)

        def write(_fd: int, data: bytes) -> None:
            loop: Any = asyncio.get_running_loop()
            job.note(f"    {loop.name}: {data.decode().strip().replace(str(folder), '')}")

        patch.setattr(MessageStream, "__hash__", lambda stream: stream._sock.number)
        patch.setattr(handshake, "socket", Sockets(job.network))
        patch.setattr(console, "os", SimpleNamespace(write=write))
        patch.setattr(agent_module, "Participation", SimParticipation)
        patch.setattr(participation, "LocalNode", SimNode)
        patch.setattr(participation, "Leader", SimLeader)
        patch.setattr(participation, "ControlServer", SimControl)
        patch.setattr(
            participation,
            "Replicator",
            lambda *_, **__: job.replicator(job.nodes[-1]),
        )
        patch.setattr(leader_module, "Store", SimStore)
        patch.setattr(leader_module, "CoordinatorServer", SimServer)
        patch.setattr(rendezvous, "find", _find)
        patch.setattr(rendezvous, "redirect", _reach)
        patch.setattr(agent_module, "children", SimpleNamespace(wait_gone=_gone))
        try:
            yield job
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {job.told(error)}") from error
        finally:
            job.bury()
            shutil.rmtree(folder)
            random.setstate(before)
