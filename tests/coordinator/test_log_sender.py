"""The log on its way: events of one turn of the loop are one message, which comes whole or not at all, and before orders."""

import asyncio

from kit.ends import NodeEnd
from kit.house import SETTINGS, in_house
from kit.tagged import tagged_pair

from deadpool_run.coordinator.log_follower import LogFollower
from deadpool_run.coordinator.log_sender import _MOST_TOGETHER, LogSender
from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.leadership.electorate import LogIndex
from deadpool_run.wire import peers

ORDER = peers.Order(do.DismissWorker(1), 1)


class Log:
    """A leader's log, with nodes that are connected to it."""

    def __init__(self, house):
        self.house, self.sender = house, LogSender(house.connections)
        self.state, self.entries, self.followers = coordinator.new_state(SETTINGS), 0, {}

    async def join(self, name):
        end, node = await self.house.join(name)
        self.followers[node] = LogFollower(SETTINGS)
        return end, node

    def begin(self, node, term=1):
        self.sender.begin(node, term, self.entries, float(self.entries), self.state)

    def decide(self, count=1, term=1):
        for _ in range(count):
            event = ev.NodeJoined(f"n{self.entries}", ev.Place("n"))
            now = float(self.entries)
            coordinator.step(SETTINGS, self.state, event, now)
            self.entries += 1
            self.sender.log(term, self.entries, now, event)

    async def settle(self):
        """Wait until nothing is on its way."""
        for _ in range(20):
            await asyncio.sleep(0)

    def follow(self, end, node):
        """Return the messages of the log that came, and follow them as the node would."""
        told = [message for message in end.heard if isinstance(message, peers.LogState | peers.LogEntries)]
        for message in told:
            self.followers[node].take_in(message)
        return told

    def knows_all(self, node, term=1):
        known = self.followers[node].known
        assert known.index == LogIndex(term, self.entries)
        assert known.state == self.state


@in_house
async def test_the_events_of_a_turn_are_one_message_and_come_before_orders(house):
    log = Log(house)
    end, node = await log.join("n")
    log.begin(node)
    log.decide(3)
    log.house.connections.send(node, ORDER)
    log.decide(2)
    await end.hears(5)
    log.decide()
    await end.hears(6)
    (_, first, second) = log.follow(end, node)
    assert [len(first.entries), len(second.entries)] == [5, 1]
    log.knows_all(node)


@in_house
async def test_the_log_leaves_before_the_orders_of_its_turn(house):
    """To other nodes too: else a leader that fails then has given orders that no other knows."""
    log = Log(house)
    _, node = await log.join("n")
    _, other = await log.join("other")
    log.begin(node)
    await log.settle()
    written = []
    for each in (node, other):
        stream = log.house.connections._by_node[each]
        stream._write = lambda name=each, honest=stream._write: (written.append(name), honest())
    log.decide()
    log.house.connections.send(other, ORDER)
    await log.settle()
    assert written[:2] == [node, other]


@in_house
async def test_a_node_that_begins_within_a_turn_gets_no_event_twice(house):
    log = Log(house)
    end, node = await log.join("n")
    late, newcomer = await log.join("late")
    log.begin(node)
    log.decide(3)
    log.begin(newcomer)
    log.decide(2)
    await end.hears(5)
    await late.hears(4)
    assert [type(each) for each in log.follow(late, newcomer)] == [peers.LogState, peers.LogEntries]
    log.follow(end, node)
    log.knows_all(node)
    log.knows_all(newcomer)


@in_house
async def test_events_of_two_terms_are_two_messages(house):
    log = Log(house)
    end, node = await log.join("n")
    log.begin(node)
    log.decide(2, term=1)
    log.decide(1, term=3)
    await end.hears(5)
    told = [message for message in end.heard if isinstance(message, peers.LogEntries)]
    assert [(each.term, each.after, len(each.entries)) for each in told] == [(1, 0, 2), (3, 2, 1)]


@in_house
async def test_a_turn_with_many_events_is_several_messages(house):
    """A follower is busy while it decides on one."""
    log = Log(house)
    end, node = await log.join("n")
    log.begin(node)
    log.decide(_MOST_TOGETHER + 1)
    await end.hears(5)
    assert [len(each.entries) for each in log.follow(end, node)[1:]] == [_MOST_TOGETHER, 1]
    log.knows_all(node)


@in_house
async def test_a_follower_that_is_cut_off_within_a_message_gets_it_again_whole(house):
    log = Log(house)
    end, node = await log.join("n")
    log.begin(node)
    await end.hears(3)
    before = log.follow(end, node)
    assert len(before) == 1
    stream = log.house.connections._by_node[node]
    honest = stream._sock
    stream._sock = Cutting(honest, 40)
    log.decide(5)
    await log.house.owner.until(lambda: node in log.house.owner.gone)
    assert len(end.heard) == 3, "a part of the message was handled"
    ours, theirs = tagged_pair()
    log.house.connections.accept(ours)
    again = NodeEnd(theirs)
    log.house.ends.append(again)
    log.decide(2)
    again.send(peers.ResumeLink(node, 1, 3))
    await again.hears(3)
    assert [type(each) for each in again.heard] == [peers.LinkResumed, peers.LogEntries, peers.LogEntries]
    assert [len(each.entries) for each in log.follow(again, node)] == [5, 2]
    log.knows_all(node)


class Cutting:
    """A socket that takes so many more bytes, and then breaks."""

    def __init__(self, sock, left):
        self._sock, self._left = sock, left

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def sendmsg(self, pieces, _rights):
        data = b"".join(pieces)[: self._left]
        self._left -= len(data)
        if not data:
            self._sock.shutdown(2)
            raise BrokenPipeError
        return self._sock.send(data)


@in_house
async def test_all_messages_of_a_turn_to_one_node_share_a_tag(house):
    log = Log(house)
    end, node = await log.join("n")
    log.begin(node)
    await end.hears(3)
    tagger = house.connections._by_node[node]._sending
    before = tagger._number
    log.decide(3)
    await end.hears(4)
    assert tagger._number == before + 1
    for _ in range(8):
        house.connections.send(node, ORDER)
    assert (await end.hears(12))[4:] == [ORDER] * 8
    assert tagger._number == before + 2
