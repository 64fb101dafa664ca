"""One agent of the benchmark `scale`, with its figures: the leader, or the follower that becomes leader after it.

All its work with other agents is real: `Participation` with leader, coordinator, journal, election, log followers,
connections and frames. The node's workers are simulated, and there is no fork server.

Each line on stdin is a command. The answer is a line of JSON on stdout with CPU seconds of the process.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scale_workers import BenchWorkers

from deadpool_run.agent.cluster import participation
from deadpool_run.agent.cluster.capacity import raise_limits
from deadpool_run.agent.cluster.follower import Follower
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.cluster.participation import Participation
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.agent.records.launch_identity import identity_of
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.rendezvous import peer_server, rendezvous
from deadpool_run.agent.rendezvous.peer_server import PeerServer
from deadpool_run.agent.spec import LOGS_OFF, Cluster, LaunchSpec, Mode, Target
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.effects import Effect
from deadpool_run.core.leadership import electorate
from deadpool_run.core.leadership.electorate import MAX_VOTERS
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole, Credentials
from deadpool_run.wire.peer_connection import PeerConnection

CREDENTIALS = Credentials(b"of the benchmark")
TIMEOUT_S = 600.0
"""`--node-timeout`. It is long, so that only commands cause work during a run."""


PATIENCE_S = 300.0
"""The timeout of a connection. It is long, because a few cores run all nodes."""


def be_patient() -> None:
    """Use the long timeout for greetings."""
    peer_server.Greeting = partial(peer_server.Greeting, timeout_s=PATIENCE_S)  # type: ignore[misc, assignment]
    peer_server._UNDISTURBED_S = PATIENCE_S


class MeasuredLeader(Leader):
    """A leader that records when it last gave orders of each kind, in CPU seconds of the process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._unnoted: set[type] = set()
        self.measure()
        super().__init__(*args, **options)

    def measure(self) -> None:
        """Begin to count."""
        self.last = dict.fromkeys((do.AbortStep, do.AttachGroups), 0.0)
        self.given = dict.fromkeys(self.last, 0)

    def perform(self, effect: Effect) -> None:
        """Give the order."""
        super().perform(effect)
        kind = type(effect)
        if kind in self.last:
            self.given[kind] += 1
            self._unnoted.add(kind)

    def _decided(self) -> None:
        """Note the time: the frames of all orders so far are written."""
        self.last |= dict.fromkeys(self._unnoted, time.process_time())
        self._unnoted.clear()
        super()._decided()

    def resume(self) -> None:
        """Start the measurement when a takeover starts."""
        self.measure()
        super().resume()


class BenchNode(LocalNode):
    """The agent's node."""

    def __init__(self, spec: LaunchSpec, here: peers.Peer, **others: Any) -> None:
        super().__init__(spec, here, **others)
        self._workers = BenchWorkers(here.node)

    def perform(self, effect: Effect, _capture_interval: int, _source: peers.Peer | None) -> None:
        """Obey an order, and report in the next turn of the loop."""
        for answer in self._workers.obey(effect):
            asyncio.get_running_loop().call_soon(self.above.report, peers.Fact(answer))

    def set_buddies(self, news: peers.Buddies) -> None:
        """Report that the copies are made."""
        for answer in self._workers.copy(news):
            asyncio.get_running_loop().call_soon(self.above.report, answer)

    def set_world(self, world: peers.World) -> None:
        """Note the timeline."""
        super().set_world(world)
        self._workers.timeline = world.timeline

    def resynced(self) -> ev.NodeResynced:
        """Return the inventory for a new leader."""
        return self._workers.found()


def node_spec(folder: Path, name: str, options: argparse.Namespace) -> LaunchSpec:
    """Return the launch of a node."""
    nodes, ranks_per_node = options.nodes, options.ranks_per_node
    ranks = nodes * ranks_per_node
    settings = Settings(world_size=ranks, nodes=nodes, spare_nodes=options.spare_nodes, node_timeout_s=TIMEOUT_S)
    endpoint = ("127.0.0.1", options.join or 1)
    cluster = Cluster(endpoints=(endpoint,), token=CREDENTIALS.token, node_name=name)
    return LaunchSpec(
        settings=settings,
        target=Target(Mode.PATH, ("train.py",)),
        nproc_per_node=ranks_per_node,
        run_id="scale",
        run_dir=folder / name,
        log_dir=LOGS_OFF,
        hang_timeout_s=0.0,
        cluster=cluster,
    )


class BenchAgent:
    """The agent, in the running loop."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        assert spec.cluster is not None
        self._node = NodeId(spec.cluster.node_name)
        listener = socket.create_server(("127.0.0.1", 0))
        self._server = PeerServer(listener, CREDENTIALS, self._come)
        forkserver = SimpleNamespace(
            environment={}, fork=lambda _: None, recall=lambda _: None, testify=lambda *_: None
        )
        place = ev.Place(self._node, "127.0.0.1", self._server.port)
        self._place = place
        self._make = lambda node: Participation(spec, node, place, forkserver=forkserver, output=Logs(spec))
        self._member: Participation

    def _come(self, role: ConnectionRole, connection: PeerConnection) -> None:
        self._member.accept(role, connection)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    @property
    def leader(self) -> MeasuredLeader:
        """The agent's leader."""
        assert isinstance(self._member.leader, MeasuredLeader)
        return self._member.leader

    async def found(self) -> None:
        """Lead."""
        self._member = self._make(self._node)
        await self._member.found(0)

    async def join(self, port: int) -> None:
        """Follow the leader."""
        connection = await asyncio.to_thread(rendezvous.dial, ConnectionRole.MEMBER, "127.0.0.1", port, CREDENTIALS)
        follower = Follower(connection, peers.Join(self._place, identity_of(self._spec)))
        joined, agents = await follower.admitted(asyncio.get_running_loop().create_future(), TIMEOUT_S)
        self._member = self._make(joined.node)
        await self._member.join(follower, agents)

    async def obey(self, command: str, *words: str) -> dict[str, Any]:
        """Run a command, and return its figures."""
        match command:
            case "protected":
                await self._until(lambda: self.leader.state.phase is JobPhase.RUNNING)
                return {"cpu_s": time.process_time(), "entries": self.leader.server.entries}
            case "heartbeats":
                return await self._heartbeats()
            case "lose":
                return await self._lose(self._unrelated(int(words[0])))
            case "voter":
                return await self._lose_voter()
            case "followed":
                replica = self._member._replica
                await self._until(lambda: replica.known is not None and replica.known.index.entries >= int(words[0]))
                return {"cpu_s": time.process_time()}
            case "led":
                return await self._led(float(words[0]))
            case _:
                raise AssertionError(command)

    async def _heartbeats(self) -> dict[str, Any]:
        """Send a heartbeat to every node, and handle the answers."""
        leadership = self._member.leadership
        await self._heard_from_all()  # only nodes that have answered become voters
        await self._until(self._is_settled)
        began = time.process_time()
        await self._heard_from_all()
        leadership.handle(electorate.Tick())  # it checks all answers
        return {"cpu_s": time.process_time() - began}

    async def _heard_from_all(self) -> None:
        """Send a heartbeat to every node, and wait for the answers. They arrive after all earlier messages."""
        followers, sent_at = self.leader.followers, asyncio.get_running_loop().time()
        assert followers is not None
        followers._heartbeat()
        others = len(self.leader.state.nodes) - 1
        await self._until(lambda: sum(seen.at >= sent_at for seen in followers.seen.values()) == others)

    async def _lose(self, nodes: set[NodeId]) -> dict[str, Any]:
        """Give up nodes at once, and wait until every rank has completed a step after the repair."""
        await self._heard_from_all()
        leader, began = self.leader, time.process_time()
        epoch = leader.state.epoch
        leader.measure()
        for node in nodes:
            self._member.leadership.handle(electorate.AgentEnded(node))
        await self._until(lambda: leader.state.epoch > epoch and leader.state.repair is None)
        assert leader.state.epoch == epoch + 1, "losses found at the same time took more than one epoch"
        return self._figures(began)

    async def _lose_voter(self) -> dict[str, Any]:
        """Give up the newest voter, and wait until another node votes and has the state."""
        leader, began = self.leader, time.process_time()
        followers = leader.followers
        assert followers is not None
        before = followers.voters
        figures = await self._lose({before[-1]})
        await self._until(lambda: before[-1] not in followers.voters and self._is_settled())
        await self._until(lambda: followers.log.followers >= {*followers.voters} - {self._node})
        return figures | {"cpu_s": time.process_time() - began}

    async def _led(self, began: float) -> dict[str, Any]:
        """Wait until this agent leads, and has repaired everything."""
        await self._until(lambda: self._member.leader is not None)
        leader = self.leader
        await self._until(lambda: leader.state.move is None and leader.state.repair is None)
        figures = self._figures(began)
        assert figures["orders"], "the new leader stopped no step"
        return figures

    def _unrelated(self, count: int) -> set[NodeId]:
        """Return `count` nodes with ranks. None of them votes, or holds copies of another's ranks: their loss would end the job."""
        state, followers = self.leader.state, self.leader.followers
        assert followers is not None
        related: dict[NodeId, set[NodeId]] = {node: set() for node in state.nodes}
        for seat in state.seats:
            assert seat.node is not None
            for buddy in state.buddies[seat.rank]:
                related[seat.node].add(buddy)
                related[buddy].add(seat.node)
        found: set[NodeId] = set()
        for node in dict.fromkeys(seat.node for seat in state.seats):
            if node is not None and node not in followers.voters and len(found) < count and not related[node] & found:
                found.add(node)
        return found

    def _figures(self, began: float) -> dict[str, Any]:
        last, given = self.leader.last, self.leader.given
        return {
            "orders": given[do.AbortStep],
            "told_s": last[do.AbortStep] - began,
            "attach_s": last[do.AttachGroups] - began,
            "over_s": time.process_time() - began,
        }

    def _is_settled(self) -> bool:
        """Tell whether there are enough voters. If not, let the election check at once, not after its long timeout."""
        leadership = self._member.leadership
        if len(leadership.agent.configurations) == 1 and len(leadership.agent.configuration.voters) == MAX_VOTERS:
            return True
        leadership.handle(electorate.Tick())
        return False

    async def _until(self, met: Any) -> None:
        while not met():  # noqa: ASYNC110 - there is no event for all of it
            await asyncio.sleep(0.02)


async def serve(options: argparse.Namespace) -> None:
    """Take part in the job, and run commands until stdin ends."""
    name = "leader" if options.join is None else "successor"
    spec = node_spec(options.folder, name, options)
    spec.run_dir.mkdir(mode=0o700)
    raise_limits(spec.settings)
    agent = BenchAgent(spec)
    await (agent.found() if options.join is None else agent.join(options.join))
    tell({"port": agent.port})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        tell(await agent.obey(*line))


def tell(answer: dict[str, Any]) -> None:
    """Answer a command."""
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Run the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--spare-nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--join", type=int, help="the leader's port")
    parser.add_argument("--folder", type=Path, required=True, help="for records")
    options = parser.parse_args()
    be_patient()
    participation.Leader = MeasuredLeader  # type: ignore[misc]
    participation.LocalNode = BenchNode  # type: ignore[misc]
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
