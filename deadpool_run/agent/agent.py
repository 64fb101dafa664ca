"""The agent: connects the parts of one machine's launch, and closes them in order.

It leads the job, with the coordinator in its process, or follows a leader on another node. The coordinator decides, the node
acts; this module only starts, connects and ends them. It never imports torch.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_run.agent.checkpoint.leader import EXIT_QUEUE_AGAIN
from deadpool_run.agent.cluster.capacity import raise_limits
from deadpool_run.agent.cluster.follower import EndedError, Follower, LostError, NoLeader, RedirectError
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.cluster.participation import Participation
from deadpool_run.agent.cluster.slurm_cancel import cancel_if_abandoned, cancel_if_srun_is_gone
from deadpool_run.agent.console import Console, announcement, in_background, tell, write_json
from deadpool_run.agent.environment import omp_banner, without_ignored_hangup
from deadpool_run.agent.loop_watch import LoopWatch
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.agent.processes import children
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.forkserver_process import ForkServerProcess, ForkServerSpec
from deadpool_run.agent.processes.store import LOOPBACK
from deadpool_run.agent.records import old_runs, script_copy
from deadpool_run.agent.records.launch_identity import identity_of
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.records.run_record import component, make_run_dir
from deadpool_run.agent.rendezvous import earlier_run, rendezvous
from deadpool_run.agent.rendezvous.peer_server import PeerServer
from deadpool_run.agent.spec import Cluster, LaunchSpec
from deadpool_run.coordinator.control import ControlServer
from deadpool_run.coordinator.requests import with_node_here
from deadpool_run.core.events import Event, JobSubmitted, Place, StopRequested
from deadpool_run.errors import DeadpoolError, MachineError
from deadpool_run.ids import ONLY_NODE, NodeId, first_id
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole
from deadpool_run.wire.peer_connection import PeerConnection

_END_TIMEOUT_S = 10.0
"""At the end: how long killed processes may take to end. Then they are left to the kernel."""
_RETRY_S = 0.2
"""Pause before the node asks again to be admitted."""
_ADMISSION = 4.0
"""Node timeouts that a leader has to answer a node that joins. One without a lease has regained it, or given up, by then."""
_SLOW = 0.1
"""Node timeouts that a loop may be blocked without a line in the log: half the time between two heartbeats."""
_EXIT_LAUNCH_FAILED = 1
_FAILED = (_EXIT_LAUNCH_FAILED, "deadpool-run itself failed")


def run(spec: LaunchSpec, forkserver_spec: ForkServerSpec, forkserver: ForkServerProcess) -> int:
    """Run the job to its end and return the exit code. Raises `UsageError` if its directories cannot be used."""
    children.become_subreaper()
    if spec.cluster is not None:
        children.hide_memory()  # it holds the token
    with in_background() as console:
        if too_few := raise_limits(spec.settings):
            tell(too_few)
        agent = _Agent(spec, forkserver_spec, forkserver, console)
        exit_code = asyncio.run(agent.main())
        if agent.living is not None or agent.found_nobody:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # scancel sends it to this process too
            asyncio.run(
                cancel_if_abandoned(spec.slurm, agent.base or spec.run_dir, tell)
                if agent.living is None
                else cancel_if_srun_is_gone(spec.slurm, agent.living, tell)
            )
    return exit_code


class _Agent:
    """One launch. `main` makes its parts in the running loop, and closes them in reverse order."""

    def __init__(
        self,
        spec: LaunchSpec,
        forkserver_spec: ForkServerSpec,
        forkserver: ForkServerProcess,
        console: Console | None = None,
    ) -> None:
        self._spec = spec
        self._console = console
        self._forkserver_spec, self._first_forkserver = forkserver_spec, forkserver
        self._leader: Leader | None = None
        self._node: LocalNode | None = None
        self._member: Participation | None = None
        self.base: Path | None = None
        """The directory of this node's last run."""
        self._former: rendezvous.Former | None = None
        self.living: frozenset[str] | None = None
        """The names of the nodes that were in the job at its end, if this node led it."""
        self.found_nobody = False
        """The search for the other nodes failed."""
        self._was_member = False

    async def main(self) -> int:
        spec = self._spec
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[tuple[int, str]] = loop.create_future()
        loop.set_exception_handler(self._on_bug)
        grace_s = spec.settings.shutdown_timeout_s
        self._forkserver = ForkServer(self._forkserver_spec, self._on_lost, self._first_forkserver, grace_s)
        for number in without_ignored_hangup(spec.signals_to_handle):
            loop.add_signal_handler(number, self._on_signal, number)
        if signal.SIGUSR1 not in spec.signals_to_handle:
            loop.add_signal_handler(signal.SIGUSR1, self._on_preemption_notice)
        loop.add_signal_handler(signal.SIGCHLD, self._forkserver.reap_strangers)
        watch = (
            None if spec.cluster is None else LoopWatch(_SLOW * spec.settings.node_timeout_s, tell, self._while_late)
        )
        try:
            if banner := omp_banner(spec.nproc_per_node, os.environ):
                tell(banner)
            return await (self._alone() if spec.cluster is None else self._among_others(spec.cluster))
        finally:
            if watch is not None:
                watch.close()
            await self._end()

    def _remove_old_runs(self) -> None:
        """Remove what `--keep-runs` says; not before a job was found or founded, as an earlier run may be evidence of it."""
        if self._spec.keep_runs is not None:
            old_runs.remove_in_background(self._spec.run_dir.parent, self._spec.keep_runs)

    # --- one machine ------------------------------------------------------------------------------------------------

    async def _alone(self) -> int:
        """Be the leader and the only node."""
        self._remove_old_runs()
        spec = self._spec
        here = peers.Peer(ONLY_NODE, LOOPBACK, 0)
        exit_code, reason = _FAILED
        output = Logs(spec, self._console)
        control = ControlServer(spec.run_dir, self._answer)
        try:
            node = self._node = LocalNode(spec, here, forkserver=self._forkserver, output=output, above=NoLeader())
            leader = self._leader = Leader(
                spec,
                node,
                forkserver=self._forkserver,
                output=output,
                on_over=self._on_stop,
                on_lost=self._on_lost,
                on_news=control.notify,
            )
            node.above = leader
            leader.begin()
            await control.start()
            leader.submit(JobSubmitted(place=Place(devices=spec.devices)))
            exit_code, reason = await leader.durable.finish(*await self._over)
        finally:
            if self._leader is not None:
                await self._leader.end(peers.End(exit_code, reason))
            await control.close()
            self._forkserver.end_strangers()
            self._forkserver.close()
            await self._end_node(output)
            if self._leader is not None:
                self._leader.close(exit_code, reason)
        return exit_code

    async def _answer(self, request: Mapping[str, Any]) -> bytes:
        """Answer a viewer."""
        assert self._leader is not None
        return await self._leader.request_handler.encoded(with_node_here(request, ONLY_NODE))

    # --- several machines -------------------------------------------------------------------------------------------

    async def _among_others(self, cluster: Cluster) -> int:
        """Find or found the job, and rejoin it after this node was declared lost."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        found: rendezvous.Founder | rendezvous.Found | rendezvous.Over | None = None
        earlier = None if cluster.authority is not None else await asyncio.to_thread(earlier_run.find, self._spec)
        while True:
            if found is None:
                found = await rendezvous.find(
                    cluster,
                    self._over,
                    settings=self._spec.settings,
                    former=self._former,
                    base=self.base,
                    earlier=earlier if self._former is None else None,
                )
            if isinstance(found, rendezvous.Over):
                self.found_nobody = not self._over.done()
                tell(found.reason)
                return found.exit_code
            try:
                return await self._be_member(cluster, found)
            except RedirectError as redirect:
                leader = redirect.leader
                found = await rendezvous.redirect(cluster, leader.address, leader.port)
                why = f"the leader at {leader.address}:{leader.port} does not answer"
                if found is None and not await self._may_retry(since, why):
                    return _EXIT_LAUNCH_FAILED
            except EndedError as ended:
                tell(f"the job has ended: {ended}")
                return ended.end.exit_code
            except LostError as error:
                found = None
                if not self._was_member:  # that agent does not know the leader either
                    if not await self._may_retry(since, str(error)):
                        return _EXIT_LAUNCH_FAILED
                    continue
                since = loop.time()
                tell(f"{error}; this node ends its workers and asks to rejoin as a spare")

    async def _may_retry(self, since: float, why: str) -> bool:
        """Wait a moment. False, with a line, if no leader has admitted this node in time."""
        timeout_s = self._spec.settings.join_timeout_s
        self.found_nobody = asyncio.get_running_loop().time() - since > timeout_s
        if self.found_nobody:
            tell(f"no leader admitted this node within {timeout_s:g} s ({why})")
            return False
        await asyncio.wait({self._over}, timeout=_RETRY_S)
        return True

    async def _be_member(self, cluster: Cluster, found: rendezvous.Founder | rendezvous.Found) -> int:
        """Be a node of the job to its end. Raises `LostError` if the job continues without it, `EndedError` if it is refused."""
        self._was_member = False
        with closing(PeerServer(found.listener, rendezvous.searcher(cluster), self._on_peer)) as server:
            devices = self._spec.devices
            place = Place(
                cluster.node_name, found.address, server.port, cluster.failure_domain, cluster.node_rank, devices
            )
            if isinstance(found, rendezvous.Founder):
                spec = self._spec
                if found.term > 0:  # the run's directory still has the earlier files
                    spec = replace(spec, run_dir=spec.run_dir.with_name(f"{spec.run_dir.name}-r{found.term}"))
                node = first_id(cluster.node_name, found.term)
                server.credentials = spec.credentials(node)
                return await self._live(spec, node, place, found.term)
            with closing(Follower(found.connection, peers.Join(place, identity_of(self._spec)))) as follower:
                joined, agents = await follower.admitted(self._over, _ADMISSION * self._spec.settings.node_timeout_s)
                spec = self._spec_of(cluster, joined)
                server.credentials = spec.credentials(joined.node)
                return await self._live(spec, joined.node, place, (follower, joined, agents))

    async def _live(
        self,
        spec: LaunchSpec,
        node: NodeId,
        place: Place,
        began: int | tuple[Follower, peers.Joined, peers.Agents],
    ) -> int:
        """`began` is the term in which this node founded the job, or its admission to it."""
        exit_code, reason, fenced, failed = *_FAILED, False, False
        if spec.json_log:
            write_json(spec.run_id)  # a node that joins takes the job's
        make_run_dir(spec.run_dir)
        self._remove_old_runs()
        script_copy.write(spec)
        self.base = spec.base_dir or spec.run_dir
        output = Logs(spec, self._console)
        member = self._member = Participation(spec, node, place, forkserver=self._forkserver, output=output)
        self._node, self._was_member = member.node, True
        try:
            if isinstance(began, int):
                await member.found(began)
            else:
                follower, joined, agents = began
                tell(f"joined run {joined.run_id} as node {joined.node}")
                await member.join(follower, agents)
            await asyncio.wait({member.over, self._over}, return_when=asyncio.FIRST_COMPLETED)
            exit_code, reason = member.over.result() if member.over.done() else self._over.result()
            fenced = reason == peers.DRAINED  # then others lead, and count on this node no more
            if member.over.done() and member.leader is not None and not fenced:
                exit_code, reason = await member.leader.durable.finish(exit_code, reason)
            if exit_code and member.leader is None:
                tell(announcement("the job has ended", reason))
            if fenced:
                tell(reason)
        except LostError as error:
            fenced, reason = True, str(error)
            others = [(peer.address, peer.port) for peer in member.leadership.others()]
            self._former = rendezvous.Former(spec.run_id, (place.address, place.port), others)
            raise
        except Exception as error:
            # A bug in this agent, or a failure of this machine: if it leads, another agent can lead. Any other error it would meet too.
            failed = isinstance(error, MachineError) or not isinstance(error, DeadpoolError)
            raise
        finally:
            await member.end(exit_code, reason, fenced=fenced or failed)
            if not fenced:
                self._forkserver.end_strangers()
                self._forkserver.close()
            await self._end_node(output)
            member.advertisement.close(exit_code, reason, fenced=fenced or failed)
            if member.leader is not None and not fenced:
                self.living = frozenset(node.place.name for node in member.leader.state.nodes.values())
            self._member = None
        return exit_code

    def _spec_of(self, cluster: Cluster, joined: peers.Joined) -> LaunchSpec:
        """Return this node's launch with the job's settings. Raises `ProtocolError`."""
        base = self._spec.run_dir if cluster.own_directory else self._spec.run_dir.parent / component(joined.run_name)
        return replace(
            self._spec,
            settings=joined.settings,
            run_id=joined.run_id,
            run_dir=base / component(f"node-{joined.node}"),
            durable=joined.durable,
            base_dir=base,
        )

    def _on_peer(self, role: ConnectionRole, connection: PeerConnection) -> None:
        if self._member is None:
            connection.close()
        else:
            self._member.accept(role, connection)

    # --- signals, and failures of the parts -------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        """Pass the signal to the coordinator as a request to stop. Without a job, end."""
        event: Event = StopRequested(number)
        if self._leader is not None:
            self._leader.submit(event)
        elif self._member is not None:
            self._member.request(event)
        else:
            self._on_stop(128 + number, f"ended by {signal.Signals(number).name} before it joined a job")

    def _on_preemption_notice(self) -> None:
        """Have the job saved, if it is durable: SIGUSR1 announces its end, as with Slurm's `--signal=USR1@SECONDS`.

        A node that has not found its job yet stops searching.
        """
        durable = self._spec.durable
        if durable is None or not durable.target:
            tell("SIGUSR1: the job will be ended soon, and is not saved: there is no --durable; training continues")
        elif self._member is not None:
            self._member.preemption_notice()
        elif self._spec.cluster is not None:
            self._on_stop(EXIT_QUEUE_AGAIN, "preempted before it joined a job")
        elif self._leader is not None:
            self._leader.durable.preemption_notice()

    def _on_stop(self, exit_code: int, reason: str) -> None:
        if not self._over.done():
            self._over.set_result((exit_code, reason))

    def _on_lost(self, reason: str) -> None:
        """End the job, or this machine's part in it: nothing can run here without a fork server or a store."""
        if self._member is not None and self._member.leadership.others():
            if not self._over.done():
                self._over.set_exception(MachineError(f"{reason}; the job continues without this machine"))
            return
        tell(reason)
        if self._leader is not None:
            self._leader.durable.close()
        self._on_stop(_EXIT_LAUNCH_FAILED, reason)

    def _while_late(self) -> None:
        """Do, in another thread, what the loop may be too late for."""
        leadership = getattr(self._member, "leadership", None)
        if leadership is not None:
            leadership.suspend_if_due()

    def _on_bug(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """End the job after an error in a callback: its state cannot be trusted."""
        error = context.get("exception") or RuntimeError(context["message"])
        if not self._over.done():
            self._over.set_exception(error)

    # --- beginning and end ------------------------------------------------------------------------------------------

    async def _end_node(self, output: Logs) -> None:
        """End the node's workers and the processes that serve them, then free their memory."""
        node = self._node
        if node is not None:
            node.end_workers()
            await self._forkserver.settled(_END_TIMEOUT_S)  # then no process is being forked
            await children.wait_gone(self._forkserver.children(), _END_TIMEOUT_S)
        self._forkserver.kill_strangers(_END_TIMEOUT_S)
        output.close()
        if node is not None:
            node.close()
        self._node = None

    async def _end(self) -> None:
        """End all processes that are left, however the job ended."""
        self._forkserver.close()
        await children.wait_gone(self._forkserver.processes(), _END_TIMEOUT_S)
        children.kill_strangers(_END_TIMEOUT_S)
