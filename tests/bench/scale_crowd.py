"""The other nodes of the benchmark `scale`: simulated agents with real connections, many in one process.

Each node has its own address in 127.0.0.0/8, and all use the same port. They obey at once, vote for every candidate, and
follow every leader of a newer term.
"""

import argparse
import asyncio
import resource
import socket
import sys
from pathlib import Path
from typing import Any

from scale_agent import CREDENTIALS, PATIENCE_S, be_patient, node_spec, tell
from scale_workers import BenchWorkers

from deadpool_run.agent.records.launch_identity import identity_of
from deadpool_run.agent.rendezvous.peer_server import PeerServer
from deadpool_run.core import events as ev
from deadpool_run.core.leadership.electorate import VoteAsked, VoteGiven
from deadpool_run.ids import NodeId
from deadpool_run.transport import handshake
from deadpool_run.transport.link import PeerLink
from deadpool_run.vault.status_page import WORDS
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole
from deadpool_run.wire.peer_connection import PeerConnection

_DIALS = 64
"""At once."""


def address_of(number: int) -> str:
    """Return the address of a node."""
    return f"127.{1 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


class CrowdNode:
    """One node."""

    def __init__(self, crowd: "Crowd", number: int) -> None:
        self._crowd = crowd
        self._place = ev.Place(f"node{number}", address_of(number), crowd.port)
        self.workers = BenchWorkers(NodeId(self._place.name))
        self._link: PeerLink | None = None
        self._term = 0
        self._received = 0
        self.heard_claim = asyncio.Event()
        """Set when a new leader or another node has told this node of the leader, or when the node was lost."""

    async def join(self, port: int) -> None:
        """Join the leader."""
        await self._connect("127.0.0.1", port, peers.Join(self._place, self._crowd.launch))

    def come(self, role: ConnectionRole, connection: PeerConnection) -> None:
        """Serve another agent."""
        assert role is ConnectionRole.VOTE, role
        link = PeerLink(connection, lambda message: self._vote(link, message))

    def _vote(self, link: PeerLink, message: peers.Message) -> None:
        match message:
            case VoteAsked(term, pre_vote=pre_vote):
                link.send(VoteGiven(term, self.workers.node, pre_vote, granted=True, voted_term=term))
            case peers.LeadershipClaim(sent_at, agents, relay):
                for peer in relay:
                    self._crowd.start(self._relay(peer, peers.LeadershipClaim(sent_at, agents)))
                newest = agents.configurations[-1]
                link.send(peers.HeartbeatAck(newest.term, sent_at, newest.number, node=self.workers.node))
                if newest.term > self._term:
                    self._term = newest.term
                    self.heard_claim.set()
                    (leader,) = (peer for peer in agents.peers if peer.node == newest.leader)
                    rejoin = peers.Rejoin(self.workers.node, self._place, self.workers.found())
                    self._crowd.start(self._connect(leader.address, leader.port, rejoin))
            case _:
                sys.exit(f"{message} came on a connection for votes")

    async def _relay(self, peer: peers.Peer, claim: peers.LeadershipClaim) -> None:
        async with self._crowd.dials:
            connection = await handshake.connect(peer.address, peer.port, ConnectionRole.VOTE, CREDENTIALS, PATIENCE_S)
        link = PeerLink(connection, lambda _: None)
        link.send(claim)
        link.close_when_flushed()

    async def _connect(self, address: str, port: int, first: peers.Join | peers.Rejoin) -> None:
        async with self._crowd.dials:
            connection = await handshake.connect(address, port, ConnectionRole.MEMBER, CREDENTIALS, PATIENCE_S)
        if self._link is not None:
            self._link.close()
        self._received = 0
        self._link = PeerLink(connection, self._hear)
        self._link.send(first)

    def _hear(self, message: peers.Message) -> None:
        link = self._link
        assert link is not None
        self._received += not isinstance(message, peers.Heartbeat | peers.LinkResumed)
        match message:
            case peers.Joined(node):
                self.workers.node = node
            case peers.World(timeline=timeline):
                self.workers.timeline = timeline
            case peers.Evict():
                self.heard_claim.set()
            case peers.Heartbeat(term, sent_at, newest=newest):
                entries = tuple((rank, *[1 << 30] * WORDS) for rank in self.workers.ranks())
                link.send(peers.HeartbeatAck(term, sent_at, newest, self._received, rank_entries=entries))
            case peers.Order(effect):
                for answer in self.workers.obey(effect):
                    link.send(peers.Fact(answer))
            case peers.Buddies():
                for safe in self.workers.copy(message):
                    link.send(safe)
            case _:
                pass


class Crowd:
    """The nodes of one process, in the running loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.launch = identity_of(node_spec(Path(), "node", options))
        self.dials = asyncio.Semaphore(_DIALS)
        listener = socket.create_server(("0.0.0.0", 0))
        self._server = PeerServer(listener, CREDENTIALS, self._come)
        self.port = self._server.port
        self._tasks: set[asyncio.Task[Any]] = set()
        self._nodes = {address_of(number): CrowdNode(self, number) for number in range(*options.numbers)}

    def start(self, work: Any) -> None:
        """Do something beside."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def join(self, port: int) -> None:
        """Let every node join."""
        await asyncio.gather(*(node.join(port) for node in self._nodes.values()))

    async def all_heard_claim(self) -> None:
        """Wait until every node knows a new leader."""
        for node in self._nodes.values():
            await node.heard_claim.wait()

    def _come(self, role: ConnectionRole, connection: PeerConnection) -> None:
        self._nodes[connection.sock.getsockname()[0]].come(role, connection)


async def serve(options: argparse.Namespace) -> None:
    """Take part in the job until stdin ends. The answer to a line comes when every node knows a new leader."""
    crowd = Crowd(options)
    await crowd.join(options.join)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        await crowd.all_heard_claim()
        tell({})


def main() -> None:
    """Run the nodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--spare-nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--join", type=int, required=True, help="the leader's port")
    parser.add_argument(
        "--numbers", type=int, nargs=2, required=True, help="the first node, and the one after the last"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    be_patient()
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
