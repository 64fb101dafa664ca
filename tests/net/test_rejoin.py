"""How a node comes to follow another coordinator: by whichever agent's word, and without asking in a hurry."""

import asyncio
import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from kit.ends import LOOPBACK, Changes, End, listening, within_bound

from deadpool_run.agent.cluster import participation
from deadpool_run.agent.cluster.follower import NoLeader
from deadpool_run.agent.cluster.leadership import Leadership
from deadpool_run.agent.cluster.participation import Participation
from deadpool_run.agent.rendezvous.peer_server import PeerServer
from deadpool_run.agent.spec import Cluster
from deadpool_run.agent.tasks import Tasks
from deadpool_run.core.events import NodeResynced, Place, StopRequested
from deadpool_run.core.leadership import election
from deadpool_run.core.leadership.electorate import Configuration, ElectionRole
from deadpool_run.transport.link_session import LinkSession
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole, Credentials
from deadpool_run.wire.peers import Peer

TOKEN = b"of the job"
CREDENTIALS = Credentials(TOKEN, "me", "run")
T = 60.0
"""Nobody is fenced while a test runs."""


class Node:
    """A node's part above its workers: whom it obeys."""

    def __init__(self, above):
        self.above = above
        self.participant = SimpleNamespace(void=lambda: None)

    def voters_are(self, voters):
        pass

    def resynced(self):
        return NodeResynced("me", ())

    def end_workers(self):
        pass


class Mine(Participation):
    """A node that followed `old`, which is gone; only its connections are real."""

    def __init__(self, addresses):
        self._loop = asyncio.get_running_loop()
        self.over = self._loop.create_future()
        self.leader = None
        self._credentials, self._place, self._here = CREDENTIALS, Place("me"), ME
        self._callers = []
        self._follower, self._no_leader, self._preemption_notice, self._tasks = (
            None,
            NoLeader(),
            False,
            Tasks(self._failed),
        )
        self._timeout_s, self._session = T, LinkSession()
        self._replicator = SimpleNamespace(report_all=lambda: None)
        self.node = Node(self._no_leader)
        configurations = (Configuration(0, 1, "old", ("old", *addresses, "me")),)
        agent = election.follower("me", T, configurations, self._loop.time())
        self.leadership = Leadership(
            agent, addresses.values(), self, Cluster(endpoints=(), token=TOKEN, node_name="me"), CREDENTIALS
        )

    def hear_claim(self, agents):
        self.leadership.handle_configurations(agents)

    async def close(self):
        await self._tasks.end()
        self.leadership.close()
        if self._follower is not None:
            self._follower.close()


class Other(Changes):
    """Another agent: keeps who comes, and does with each what `greet` does."""

    def __init__(self, name, greet):
        super().__init__()
        self.name, self.greet, self.came = name, greet, []
        self.server = PeerServer(listening(), Credentials(TOKEN, name, "run"), self._come)
        self.peer = Peer(name, LOOPBACK, self.server.port)

    def _come(self, role, connection):
        assert role is ConnectionRole.MEMBER
        self.came.append((asyncio.get_running_loop().time(), End(connection)))
        self.greet(self.came[-1][1])
        self.tell()

    def close(self):
        self.server.close()
        for _, end in self.came:
            end.close()


def agents(term, leader, *others):
    voters = (*(each.peer for each in (leader, *others)), ME)
    return peers.Agents((Configuration(term, term + 1, leader.name, tuple(peer.node for peer in voters)),), voters)


ME = Peer("me", LOOPBACK, 1)


def run(main):
    async def whole():
        with ExitStack() as stack:
            await main(stack)

    within_bound(whole())


def started(stack, name, greet):
    other = Other(name, greet)
    stack.callback(other.close)
    return other


def test_one_that_leads_no_longer_names_who_does_and_that_one_is_followed():
    async def main(stack):
        later = started(stack, "y", lambda end: end.send(peers.LinkResumed(0), agents(2, later, claimed)))
        claimed = started(stack, "x", lambda end: end.send(peers.Redirect(later.peer, agents(2, later, claimed))))
        mine = Mine({"x": claimed.peer, "y": later.peer})
        mine.hear_claim(agents(1, claimed, later))
        mine.request(StopRequested(15))
        await later.until(lambda: later.came)
        end = later.came[0][1]
        rejoin, wish = await end.hears(2)
        assert rejoin == peers.Rejoin("me", Place("me"), rejoin.found)
        assert wish.event.signal == 15, "what the user wants has reached who leads"
        assert (mine.leadership.agent.term, mine.leadership.leader) == (2, later.peer)
        assert mine.node.above is mine._follower
        assert mine._follower.was_answered
        assert not mine.over.done()
        assert len(claimed.came) == len(later.came) == 1
        await mine.close()

    run(main)


def test_an_agents_outdated_word_is_not_followed():
    async def main(stack):
        before = started(stack, "old", lambda _: None)
        claimed = started(stack, "x", lambda end: end.send(peers.Redirect(before.peer, agents(0, before, claimed))))
        mine = Mine({"x": claimed.peer})
        mine.hear_claim(agents(1, claimed))
        await claimed.until(lambda: len(claimed.came) > 2)  # it is asked again: it may lead soon
        assert not before.came
        assert mine.leadership.agent.term == 1
        await mine.close()

    run(main)


def test_a_node_that_is_given_up_votes_no_more():
    async def main(stack):
        claimed = started(
            stack, "x", lambda end: end.send(peers.LinkResumed(0), agents(1, claimed), peers.Evict("it is silent"))
        )
        mine = Mine({"x": claimed.peer})
        mine.hear_claim(agents(1, claimed))
        await asyncio.wait({mine.over})
        assert str(mine.over.exception()) == "the leader declared this node lost: it is silent"
        assert mine.leadership.agent.role is ElectionRole.FENCED
        await mine.close()

    run(main)


@pytest.mark.parametrize("refuses", ["without a word", "by another's name"])
def test_one_that_does_not_lead_yet_is_asked_again_and_again_but_ever_more_rarely(refuses):
    async def main(stack):
        def greet(end):
            if len(claimed.came) == 6:
                end.send(agents(1, claimed))
            elif refuses == "without a word":
                end.close()
            else:
                end.send(peers.Redirect(claimed.peer, agents(1, claimed)))
                end.link.close_when_flushed()

        claimed = started(stack, "x", greet)
        mine = Mine({"x": claimed.peer})
        mine.hear_claim(agents(1, claimed))
        await claimed.until(lambda: len(claimed.came) == 6)
        await claimed.came[-1][1].hears(1)
        await mine._follower.answered(mine._timeout_s)
        assert mine._follower.was_answered
        assert not mine.over.done()
        times = [at for at, _ in claimed.came]
        gaps = [later - before for before, later in itertools.pairwise(times)]
        for number, gap in enumerate(gaps):
            assert gap >= min(participation._RETRY_S * 2**number, participation._MAX_RETRY_S)
        await mine.close()

    run(main)
