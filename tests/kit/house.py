"""The hub of a leader's connections with nodes that a test plays."""

import inspect

from deadpool_run.core import events as ev
from deadpool_run.core.leadership.electorate import Configuration
from deadpool_run.core.settings import Settings
from deadpool_run.ids import NodeId
from deadpool_run.transport.connections import Connections
from deadpool_run.wire import peers
from kit.ends import Changes, NodeEnd, within_bound
from kit.tagged import tagged_pair

HERE = "leader"
SETTINGS = Settings(world_size=2)
AGENTS = peers.Agents((Configuration(1, 1, NodeId(HERE), (NodeId(HERE),)),), ())


class Owner(Changes):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.events, self.words, self.gone = [], [], []
        self.held = set()
        self.connections = None

    term = 1
    founded = 0

    def agents(self):
        return AGENTS

    def refusal(self, join):
        if isinstance(join, peers.Rejoin):
            return "" if join.node == "known" else f"{join.node} is a stranger"
        return join.launch.get("wrong", "")

    def joins(self, node, join):
        if node in self.held:
            return
        assert self.connections.admit(node)
        self.connections.send(node, peers.Joined(node, "id", "name", SETTINGS, None))
        self.connections.send(node, peers.World(0, 1, "127.0.0.1", 29500))
        self.submit(ev.NodeJoined(node, join.place))

    def rejoined(self, rejoin):
        self.submit(rejoin.found)

    def hung_up(self, node):
        self.gone.append(node)
        self.tell()

    def handle(self, node, message):
        if isinstance(message, peers.Fact):
            self.submit(message.event)
        else:
            self.words.append((node, message))
        self.tell()

    def submit(self, event):
        self.events.append(event)
        self.tell()


class House:
    """A hub and the nodes that came to it."""

    def __init__(self):
        self.owner = Owner()
        self.connections = self.owner.connections = Connections(self.owner, {HERE})
        self.ends = []

    def connect(self):
        ours, theirs = tagged_pair()
        self.connections.accept(ours)
        self.ends.append(NodeEnd(theirs))
        return self.ends[-1]

    async def join(self, name="n"):
        end = self.connect()
        end.send(peers.Join(ev.Place(name), {}))
        joined, world = await end.hears(2)
        assert isinstance(world, peers.World)
        return end, joined.node

    async def gone(self):
        """Return the first node whose process has ended, as the hub says."""
        await self.owner.until(lambda: self.owner.gone)
        return self.owner.gone[0]

    async def close(self):
        await self.connections.end(peers.End(0, "closed"))
        for end in self.ends:
            end.close()


def in_house(test):
    """Run a coroutine function as a test, with a `House` as its first argument."""

    def run(**arguments):
        async def whole():
            house = House()
            try:
                await test(house, **arguments)
            finally:
                await house.close()

        within_bound(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = inspect.Signature(list(inspect.signature(test).parameters.values())[1:])
    return run
