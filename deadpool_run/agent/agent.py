"""The process of `deadpool-run` itself: wires the parts of one machine's launch, and takes them down again.

It leads a job (the coordinator lives in it) or follows one that is led elsewhere; decisions are the coordinator's, acts the
node's. Here is only who is connected to whom, and in which order things begin and end. Never imports torch.
"""

import asyncio
import os
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_run.agent import processes, rendezvous
from deadpool_run.agent.environment import base_environment, omp_banner
from deadpool_run.agent.follower import EndedError, Follower, LostError
from deadpool_run.agent.head import Head
from deadpool_run.agent.node import Above, Node
from deadpool_run.agent.nursery import Nursery
from deadpool_run.agent.nursery_main import MARK
from deadpool_run.agent.output import Output
from deadpool_run.agent.peer_server import PeerServer
from deadpool_run.agent.performer import Situation
from deadpool_run.agent.processes import Process
from deadpool_run.agent.run_record import RECORD_NAME
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.agent.tell import tell
from deadpool_run.core.events import ONLY_NODE, Event, Place, StopRequested
from deadpool_run.core.settings import Settings
from deadpool_run.errors import UsageError
from deadpool_run.ids import NodeId
from deadpool_run.vault.replication import Replicator
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import peers
from deadpool_run.wire.auth import Role

_OURS = ("deadpool_run.worker.bootstrap", "deadpool_run.worker.store_main", "deadpool_run.worker.job")
"""What every worker needs of this package; named, not imported: it imports torch."""
_END_TIMEOUT_S = 10.0
"""At the end: how long killed processes may take to be gone, before they are left to the kernel."""
_EXIT_LAUNCH_FAILED = 1
_FAILED = (_EXIT_LAUNCH_FAILED, "deadpool-run itself failed")


def run(spec: LaunchSpec) -> int:
    """Run the job to its end and return the exit code. Raises `UsageError` if its directories cannot be used."""
    processes.become_subreaper()
    return asyncio.run(_Agent(spec).main())


def _make_run_dir(run_dir: Path) -> None:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_dir.chmod(0o700)
    except OSError as error:
        raise UsageError(f"run directory {run_dir}: {error.strerror}\nchoose another with --run-dir") from error
    if (run_dir / RECORD_NAME).exists():
        raise UsageError(f"{run_dir} holds another run\ngive this one a directory of its own with --run-dir")


class _Agent:
    """One launch. Everything is made in `main`, in the running loop, and unmade there in reverse."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._mark = {MARK: uuid.uuid4().hex}
        self._head: Head | None = None
        self._node: Node | None = None
        self._follower: Follower | None = None
        self._server: PeerServer | None = None

    async def main(self) -> int:
        spec = self._spec
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[tuple[int, str]] = loop.create_future()
        loop.set_exception_handler(self._on_bug)
        if spec.cluster is None:
            _make_run_dir(spec.run_dir)
        self._nursery = Nursery(self._preload(), base_environment(spec, os.environ) | self._mark, self._on_lost)
        for number in spec.signals_to_handle:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap_strangers)
        try:
            if banner := omp_banner(spec, os.environ):
                tell(banner)
            if spec.cluster is None:
                return await self._lead(Situation(ONLY_NODE, "127.0.0.1", replicates=False), None)
            return await self._meet()
        finally:
            await self._end()

    # --- leading a job ----------------------------------------------------------------------------------------------

    async def _lead(self, situation: Situation, listener: socket.socket | None) -> int:
        """Be the coordinator's agent, and its own node's."""
        spec = self._spec
        exit_code, reason = _FAILED
        output = Output(spec)
        try:
            head = self._head = Head(
                spec,
                situation,
                nursery=self._nursery,
                log_dir=None if output.root is None else str(output.root),
                place=self._place(situation, listener),
                on_over=self._on_stop,
                on_lost=self._on_lost,
            )
            head.node = self._make_node(spec, situation, output, head)
            if listener is not None:
                self._serve(listener)
            await head.begin()
            exit_code, reason = await self._over
        finally:
            if self._head is not None:
                await self._head.end(exit_code, reason)
            self._nursery.close()
            await self._end_node(output)
            if self._head is not None:
                self._head.close(exit_code, reason)
        return exit_code

    def _place(self, situation: Situation, listener: socket.socket | None) -> Place:
        cluster = self._spec.cluster
        if cluster is None or listener is None:
            return Place()
        port = int(listener.getsockname()[1])
        return Place(cluster.node_name, situation.address, port, cluster.leaf, cluster.node_rank)

    def _make_node(self, spec: LaunchSpec, situation: Situation, output: Output, above: Above) -> Node:
        vault = Vault(spec.settings.world_size)
        node = self._node = Node(
            spec, situation, nursery=self._nursery, output=output, vault=vault, mark=self._mark, above=above
        )
        if spec.cluster is not None:
            token = spec.cluster.token
            node.copies = Replicator(
                vault,
                asyncio.get_running_loop(),
                lambda address, port: rendezvous.dial_vault(address, port, token),
                node.replicated,
                spec.cluster.bandwidth,
            )
        return node

    # --- following one ----------------------------------------------------------------------------------------------

    async def _meet(self) -> int:
        """Find the job, or found it; and find it again after we were taken for lost."""
        cluster = self._spec.cluster
        assert cluster is not None
        first = True
        while True:
            found = await rendezvous.find(cluster, self._over, may_found=first)
            if isinstance(found, rendezvous.Founder):
                situation = Situation(NodeId(cluster.node_name), found.address, replicates=True)
                _make_run_dir(self._spec.run_dir)
                return await self._lead(situation, found.listener)
            if isinstance(found, rendezvous.Over):
                tell(found.reason)
                return found.exit_code
            try:
                return await self._follow(found)
            except LostError as error:
                first = False
                tell(f"{error}; this node's workers are ended, and it asks to be taken in again as a spare")

    async def _follow(self, found: rendezvous.Found) -> int:
        """Be a node of a job that is led elsewhere. Raises `LostError` when it is lost to it."""
        cluster = self._spec.cluster
        assert cluster is not None
        self._serve(found.listener)
        assert self._server is not None
        place = Place(cluster.node_name, found.address, self._server.port, cluster.leaf, cluster.node_rank)
        self._follower = Follower(found.sock, cluster.node_timeout_s, peers.Join(place, self._spec.nproc_per_node))
        output: Output | None = None
        try:
            joined = await self._follower.joined(self._over)
            spec = self._spec_of(joined)
            _make_run_dir(spec.run_dir)
            output = Output(spec)
            situation = Situation(NodeId(joined.node), found.address, replicates=True)
            node = self._make_node(spec, situation, output, self._follower)
            tell(f"joined run {joined.run_id} as node {joined.node}")
            end = await self._follower.follow(node, self._over)
        except EndedError as error:
            end = error.end
        finally:
            self._follower.close()
            await self._end_node(output)
            if self._server is not None:
                self._server.close()
                self._server = None
        if end.exit_code:
            tell(f"the job has ended: {end.reason}")
        return end.exit_code

    def _spec_of(self, joined: peers.Joined) -> LaunchSpec:
        """Return our launch with what is the job's in it."""
        cluster = self._spec.cluster
        assert cluster is not None
        base = self._spec.run_dir if cluster.own_directory else self._spec.run_dir.parent / joined.run_name
        return replace(
            self._spec,
            settings=Settings(**joined.settings),
            run_id=joined.run_id,
            run_dir=base / f"node-{joined.node}",
        )

    def _serve(self, listener: socket.socket) -> None:
        cluster = self._spec.cluster
        assert cluster is not None
        self._server = PeerServer(listener, cluster.token, self._on_peer)

    def _on_peer(self, role: Role, sock: socket.socket) -> None:
        node, head = self._node, self._head
        if role is Role.MEMBER and head is not None and head.hub is not None:
            head.hub.accept(sock)
        elif role is Role.VAULT and node is not None and isinstance(node.copies, Replicator):
            node.copies.serve(sock)
        else:
            sock.close()

    # --- what the parts ask of the whole ----------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        """Pass a request to end on to the coordinator; before there is one, just end."""
        event: Event = StopRequested(number)
        if self._head is not None:
            self._head.submit(event)
        elif self._follower is not None and self._follower.is_member:
            self._follower.fact(event)
        else:
            self._on_stop(128 + number, f"it was ended by {signal.Signals(number).name} before it had joined a job")

    def _on_stop(self, exit_code: int, reason: str) -> None:
        if not self._over.done():
            self._over.set_result((exit_code, reason))

    def _on_lost(self, reason: str) -> None:
        """End: without a nursery or a store nothing can be run."""
        tell(reason)
        self._on_stop(_EXIT_LAUNCH_FAILED, reason)

    def _on_bug(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Turn an error in a callback into the end of the job: nothing can be relied on after it."""
        error = context.get("exception") or RuntimeError(context["message"])
        if not self._over.done():
            self._over.set_exception(error)

    # --- beginning and end ------------------------------------------------------------------------------------------

    def _preload(self) -> tuple[str, ...]:
        return (*self._spec.preload, *_OURS) if self._spec.warm else ()

    def _ours(self) -> Iterator[Process]:
        if self._node is not None:
            yield from self._node.processes()
        if self._head is not None and self._head.store.process is not None:
            yield self._head.store.process
        yield self._nursery.process

    def _reap_strangers(self) -> None:
        """Reap what was adopted from workers; not while a process of ours may not be known to be ours."""
        if not self._nursery.busy:
            known = {process.pid: process for process in self._ours()}
            processes.reap_strangers(known.get)

    async def _end_node(self, output: Output | None) -> None:
        """End the node's workers and let go of their memory."""
        node = self._node
        if node is not None:
            node.end_workers()
            await self._nursery.settled(_END_TIMEOUT_S)  # none is on its way any more
            await processes.wait_gone([each for each in node.processes() if each.alive], _END_TIMEOUT_S)
        processes.kill_strangers(_END_TIMEOUT_S, but=[process.pid for process in self._ours() if process.alive])
        if output is not None:
            output.close()
        if node is not None:
            node.close()
        self._node = None

    async def _end(self) -> None:
        """End what is left, however the job ended; nothing outlives this."""
        if self._server is not None:
            self._server.close()
        self._nursery.close()
        await processes.wait_gone([process for process in self._ours() if process.alive], _END_TIMEOUT_S)
        processes.kill_strangers(_END_TIMEOUT_S)
