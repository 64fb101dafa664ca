"""A message with a wrong content ends the connection that brought it, and nothing else."""

import asyncio
import functools
import os
from contextlib import closing
from types import SimpleNamespace

import pytest
from kit.ends import Changes, NodeEnd, within_bound
from kit.tagged import tagged_pair

from deadpool_run.agent.cluster.followers import Followers
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.cluster.orders import carry_out
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.agent.rendezvous.rendezvous import dial
from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.leadership import election
from deadpool_run.core.settings import Settings
from deadpool_run.errors import ProtocolError
from deadpool_run.transport.link import PeerLink
from deadpool_run.vault.status_page import WORDS, StatusPage, create_status_page
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole, Credentials
from deadpool_run.wire.stores import IdentifyCallers, StoreCaller

SETTINGS = Settings(world_size=1, join_timeout_s=1000.0)
TOO_LARGE = 1 << 63
"""More than a word of the status page has room for."""


class Leadership(Changes):
    """The election's part of a leader that nobody doubts."""

    def __init__(self):
        super().__init__()
        self.agent = election.first_leader("leader", 1000.0, 0.0)
        self.suspected = []

    def heartbeat(self):
        return None

    def holds_lease(self):
        return True

    def agents(self):
        return peers.Agents(self.agent.configurations, ())

    def know(self, peer):
        pass

    def handle(self, _):
        self.tell()

    def answered(self, _):
        pass

    def suspect(self, node):
        self.suspected.append(node)
        self.tell()


class OneRank:
    """A leader of one rank, on the node `bad`, with a real status page."""

    def __init__(self, page):
        self.state = SimpleNamespace(
            **{
                name: getattr(coordinator.new_state(SETTINGS), name) for name in ("nodes", "failure_domains", "founded")
            },
            seats=(SimpleNamespace(node="bad"),),
        )
        self.server = SimpleNamespace(on_entry=None, entries=0)
        self.durable = SimpleNamespace(node_lost=lambda _: None)
        self.node = SimpleNamespace(vault=SimpleNamespace(status_page=page, lives_here=lambda _: False))
        self.mirror = functools.partial(Leader.mirror, self)

    def submit(self, event):
        pass

    def welcome(self, node):
        return (peers.Joined(node, "id", "name", SETTINGS, None),)


@pytest.fixture
def page():
    with closing(StatusPage(create_status_page(1), 1)) as page:
        yield page
    os.close(page.fd)


@pytest.mark.parametrize("entry", [(0, 1, 2), (), (0, *[TOO_LARGE] * WORDS)], ids=["short", "empty", "large"])
def test_an_answer_with_a_wrong_rank_entry_ends_its_connection(page, entry):
    async def main():
        bugs = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: bugs.append(context))
        leadership = Leadership()
        followers = Followers(OneRank(page), leadership, {})
        ends = {}
        for name in ("bad", "good"):
            ours, theirs = tagged_pair()
            ends[name] = NodeEnd(theirs)
            ends[name].send(peers.Join(ev.Place(name), {}))
            followers.connections.accept(ours)
            await ends[name].hears(2)
        ends["bad"].send(peers.HeartbeatAck(0, 1.0, 1, rank_entries=(entry,)))
        await leadership.until(lambda: leadership.suspected or bugs)
        assert (leadership.suspected, bugs) == (["bad"], [])
        good = peers.HeartbeatAck(0, 2.0, 1, rank_entries=((0, *range(WORDS)),))
        ends["good"].send(good)  # the rank is not its own
        await followers.end(peers.End(0, ""))
        assert [each.reason for each in ends["good"].heard if isinstance(each, peers.End)] == [""]
        for end in ends.values():
            end.close()

    within_bound(main())


@pytest.mark.parametrize(
    "message",
    [peers.Agents((), ()), peers.LeadershipClaim(1.0, peers.Agents((), ()))],
    ids=lambda each: type(each).__name__,
)
def test_a_message_without_a_configuration_ends_its_connection(message):
    async def main():
        ours, theirs = tagged_pair()
        ended = asyncio.get_running_loop().create_future()
        link = PeerLink(ours, lambda _: None, ended.set_result)
        theirs.send(peers.encode(message))
        assert isinstance(await ended, ProtocolError)
        theirs.close()
        link.close()

    within_bound(main())


@pytest.mark.parametrize(
    "message",
    [
        peers.Committed(0, TOO_LARGE, ()),
        peers.Committed(0, 1, (TOO_LARGE,)),
        IdentifyCallers("10.0.0.1", 1, (StoreCaller(0, "nowhere", 1),)),
    ],
    ids=["committed", "abandoned", "address"],
)
def test_a_leaders_message_with_a_wrong_value_breaks_the_protocol(page, message):
    node = SimpleNamespace(timeline=0, vault=SimpleNamespace(status_page=page), _report=lambda _: None)
    node.committed, node.identify = (
        functools.partial(LocalNode.committed, node),
        functools.partial(LocalNode.identify, node),
    )
    with pytest.raises(ProtocolError):
        carry_out(node, message)


@pytest.mark.parametrize("address", ["a" * 64, "nowhere\0", ":"])
def test_an_address_that_is_none_cannot_be_reached(address):
    """It may come from a peer."""
    with pytest.raises(OSError, match=r"is no address|not known|Address family"):
        dial(ConnectionRole.VOTE, address, 1, Credentials(b"token"))


def test_a_port_that_is_none_is_not_decoded():
    with pytest.raises(ProtocolError, match="port"):
        peers.decode(peers.encode(peers.Join(ev.Place("n", port=1 << 16), {}))[4:])
