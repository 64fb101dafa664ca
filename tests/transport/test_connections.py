"""The coordinator's side of its connections: who joins and under which name, who is lost, and what all are told."""

import asyncio
import socket
import struct

import pytest
from kit.ends import BOUND_S, NodeEnd
from kit.house import AGENTS, HERE, SETTINGS, in_house
from kit.tagged import tagged, tagged_pair
from msgspec import Raw

from deadpool_run.core import events as ev
from deadpool_run.wire import peers


@in_house
async def test_a_node_is_told_its_name_first_and_then_announced(house):
    place = ev.Place("n", "10.0.0.1", 7, "leaf", 3)
    end = house.connect()
    end.send(peers.Join(place, {}))
    assert await end.hears(2) == [
        peers.Joined("n", "id", "name", SETTINGS, None),
        peers.World(0, 1, "127.0.0.1", 29500),
    ]
    assert house.owner.events == [ev.NodeJoined("n", place)]


@in_house
async def test_a_node_hears_nothing_before_it_is_admitted_and_may_go_unnoticed(house):
    house.owner.held |= {"n", "gone", "forward", "late"}
    end, gone, forward, late = (house.connect() for _ in range(4))
    for each, name in ((end, "n"), (gone, "gone"), (forward, "forward"), (late, "late")):
        each.send(peers.Join(ev.Place(name), {}))
    forward.send(peers.Ask(1, {}))
    await forward.is_lost()
    gone.close()
    _, other = await house.join("other")
    house.connections.broadcast(peers.World(0, 7, "127.0.0.1", 29500))
    assert [*house.connections.nodes()] == [other]
    assert [house.connections.admit(name) for name in ("n", "gone", "forward")] == [True, False, False]
    house.connections.send("n", peers.World(0, 8, "127.0.0.1", 29500))
    assert await end.hears(1) == [peers.World(0, 8, "127.0.0.1", 29500)]
    assert house.owner.gone == []
    await house.connections.end(peers.End(0, "over"))
    assert await late.hears(1) == [peers.End(0, "over")]


@in_house
async def test_no_two_lives_of_nodes_have_one_name(house):
    found = [(await house.join("n"))[1] for _ in range(3)]
    found.append((await house.join(HERE))[1])
    first = house.ends[0]
    first.close()
    assert await house.gone() == "n"
    found += [(await house.join("n"))[1], (await house.join("n~2"))[1]]
    assert found == ["n", "n~2", "n~3", f"{HERE}~2", "n~4", "n~2~2"]


@in_house
async def test_no_two_foundings_of_a_run_have_a_node_of_one_name(house):
    """An agent that slept through the end of the first may wake up, and follow the leader of the second."""
    house.owner.founded = 3
    assert [(await house.join("n"))[1] for _ in range(2)] == ["n~r3", "n~r3~2"]


@in_house
async def test_a_node_that_does_not_fit_is_told_why_and_never_announced(house):
    end = house.connect()
    end.send(peers.Join(ev.Place("n"), {"wrong": "not 3"}))
    assert await end.hears(1) == [peers.End(1, "not 3")]
    end.close()
    _, name = await house.join("n")
    assert name == "n"  # the name was not used up
    assert house.owner.events == [ev.NodeJoined("n", ev.Place("n"))]


@in_house
async def test_facts_arrive_in_order_and_what_else_is_said_with_who_said_it(house):
    one, _ = await house.join("a")
    two, _ = await house.join("b")
    for number in range(300):
        one.send(peers.Fact(ev.WorkerStarted(number, number)))
        two.send(peers.Fact(ev.WorkerStarted(1000 + number, number)))
    one.send(peers.Safe(1, 0, (3, 4), transcript=True))
    two.send(peers.HeartbeatAck(1, 2.0, 3, rank_entries=((1, 2),)), peers.Ask(7, {"do": "status"}))
    await house.owner.until(lambda: len(house.owner.words) >= 3 and len(house.owner.events) >= 602)
    started = [event.worker for event in house.owner.events if isinstance(event, ev.WorkerStarted)]
    assert [worker for worker in started if worker < 1000] == list(range(300))
    assert [worker for worker in started if worker >= 1000] == list(range(1000, 1300))
    assert sorted(house.owner.words, key=lambda word: word[0]) == [
        ("a", peers.Safe(1, 0, (3, 4), transcript=True)),
        ("b", peers.HeartbeatAck(1, 2.0, 3, rank_entries=((1, 2),))),
        ("b", peers.Ask(7, {"do": "status"})),
    ]


@in_house
async def test_each_is_told_what_is_for_it_and_all_what_is_for_all(house):
    one, name = await house.join("a")
    two, _ = await house.join("b")
    stranger = house.connect()
    news = peers.Committed(1, 5, ())
    house.connections.send(name, peers.Answer(1, Raw(b"{}")))
    house.connections.send("nobody", peers.Answer(2, Raw(b"{}")))
    house.connections.broadcast(news)
    assert (await one.hears(4))[2:] == [peers.Answer(1, Raw(b"{}")), news]
    assert (await two.hears(3))[2:] == [news]
    await house.connections.end(peers.End(0, ""))
    await stranger.is_lost()
    assert not stranger.heard


@in_house
async def test_nodes_are_known_by_the_addresses_from_which_they_are_connected(house):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname(), source_address=("127.0.0.9", 0))
        ours, _ = listener.accept()
    house.connections.accept(tagged(ours))
    house.ends.append(end := NodeEnd(tagged(theirs)))
    end.send(peers.Join(ev.Place("n"), {}))
    joined, _ = await end.hears(2)
    assert house.connections.addresses() == {"127.0.0.9": joined.node}
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()  # with a reset, which is not read yet
    assert house.connections.addresses() == {"": joined.node}
    assert await house.gone() == joined.node
    assert house.connections.addresses() == {}


@in_house
async def test_the_end_of_a_connection_is_told_once(house):
    end, name = await house.join("a")
    end.close()
    assert await house.gone() == name
    house.connections.send(name, peers.Evict(""))
    house.connections.evict(name, "again")
    assert house.owner.gone == [name]


@in_house
async def test_a_node_that_connects_again_misses_nothing_and_says_nothing_twice(house):
    end, name = await house.join("a")
    end.send(peers.Fact(ev.WorkerStarted(1, 1)))
    await house.owner.until(lambda: len(house.owner.events) == 2)
    house.connections.send_heartbeat(name, peers.encode(peers.Heartbeat(1, 0.0, 1, 1)))
    end.close()
    await house.gone()
    news = [peers.Committed(1, version, ()) for version in range(3)]
    for each in news:
        house.connections.broadcast(each)
    house.connections.send_heartbeat(name, peers.encode(peers.Heartbeat(1, 1.0, 1, 1)))
    again = house.connect()
    again.send(peers.ResumeLink(name, 1, 2))
    assert await again.hears(4) == [peers.LinkResumed(1), *news]
    again.send(peers.Fact(ev.WorkerStarted(2, 2)))
    await house.owner.until(lambda: len(house.owner.events) == 3)
    assert [event.worker for event in house.owner.events[1:]] == [1, 2]
    house.connections.confirmed(name, 4)
    third = house.connect()
    third.send(peers.ResumeLink(name, 1, 4))
    assert await third.hears(2) == [peers.LinkResumed(2), news[2]]
    assert (await again.is_lost())[1]
    assert house.owner.gone == [name]


@in_house
async def test_a_node_cannot_go_on_that_was_given_up_or_that_lacks_what_is_not_kept(house):
    _, name = await house.join("a")
    house.connections.confirmed(name, 2)
    late, lost, former = (house.connect() for _ in range(3))
    late.send(peers.ResumeLink(name, 1, 1))
    assert isinstance((await late.hears(1))[0], peers.Evict)
    house.connections.evict(name, "")
    lost.send(peers.ResumeLink(name, 1, 2))
    assert isinstance((await lost.hears(1))[0], peers.Evict)
    former.send(peers.ResumeLink(name, 0, 2))
    await former.is_lost()
    assert former.heard == [AGENTS], "it follows a former leader, and hears of this one"


@in_house
async def test_a_node_that_is_taken_for_lost_is_told_and_hung_up_on(house):
    end, name = await house.join("a")
    house.connections.evict(name, "it was cut off")
    assert (await end.hears(3))[2:] == [peers.Evict("it was cut off")]
    assert (await end.is_lost())[1]
    assert name not in house.connections.nodes()
    assert not house.owner.gone


@in_house
async def test_what_a_node_said_behind_the_word_that_it_was_taken_for_lost_for_is_dropped(house):
    end, name = await house.join("a")
    house.owner.handle = lambda node, _: house.connections.evict(node, "")
    house.connections.send(name, peers.Evict("x" * (4 << 20)))  # which keeps the connection open for a while
    end.send(peers.HeartbeatAck(0, 0.0, 0), peers.Fact(ev.WorkerStarted(1, 1)))
    assert (await end.is_lost())[1]
    assert house.owner.events == [ev.NodeJoined("a", ev.Place("a"))]


@in_house
async def test_a_node_goes_on_with_a_new_coordinator_if_it_is_known(house):
    found = ev.NodeResynced("known", (), (0, -1))
    known, stranger = house.connect(), house.connect()
    known.send(peers.Rejoin("known", ev.Place("known"), found))
    stranger.send(peers.Rejoin("other", ev.Place("other"), found))
    await house.owner.until(lambda: house.owner.events)
    assert house.owner.events == [found]
    assert await stranger.hears(1) == [peers.Evict("other is a stranger")]
    house.connections.broadcast(peers.Committed(1, 5, ()))
    assert await known.hears(2) == [peers.LinkResumed(0), peers.Committed(1, 5, ())]


@in_house
async def test_a_node_that_rejoins_again_has_heard_nothing_and_gets_what_it_was_sent(house):
    """Its first connection broke before any message. A later term starts with a new one."""
    rejoin = peers.Rejoin("known", ev.Place("known"), ev.NodeResynced("known", (), (0, -1)))
    for count in (1, 2):
        known = house.connect()
        known.send(rejoin)
        await house.owner.until(lambda count=count: len(house.owner.events) == count)
        if count == 1:
            house.connections.send("known", peers.Committed(1, 5, ()))
    house.connections.send("known", peers.Committed(1, 6, ()))
    assert await known.hears(3) == [peers.LinkResumed(0), peers.Committed(1, 5, ()), peers.Committed(1, 6, ())]
    house.owner.term = 2
    later = house.connect()
    later.send(rejoin)
    await house.owner.until(lambda: len(house.owner.events) == 3)
    house.connections.send("known", peers.Committed(1, 7, ()))
    assert await later.hears(2) == [peers.LinkResumed(0), peers.Committed(1, 7, ())]


@in_house
async def test_a_node_that_rejoins_again_learns_which_of_its_reports_came(house):
    """At first none of those that it made before its inventory are lacking; later the inventory does not count any more."""
    place, found = ev.Place("known"), ev.NodeResynced("known", ())
    first = house.connect()
    first.send(peers.Rejoin("known", place, found, reports=2), peers.Fact(ev.WorkerStarted(3, 3)))
    assert await first.hears(1) == [peers.LinkResumed(2)]
    await house.owner.until(lambda: len(house.owner.events) == 2)
    again = house.connect()
    again.send(peers.Rejoin("known", place, found, reports=5))
    assert await again.hears(1) == [peers.LinkResumed(3)]


@pytest.mark.parametrize(
    "word",
    [
        peers.End(0, ""),
        peers.Evict(""),
        peers.Join(ev.Place("twice"), {}),
        peers.Fact({"type": "Nonsense"}),
        peers.Fact({}),
    ],
    ids=repr,
)
@in_house
async def test_a_node_that_says_what_no_node_says_is_hung_up_on(house, word):
    end, name = await house.join("a")
    end.send(word)
    assert (await end.is_lost())[1]
    again = house.connect()
    again.send(peers.ResumeLink(name, 1, 2))
    assert isinstance((await again.hears(1))[0], peers.Evict)


@pytest.mark.parametrize(
    "word", [peers.HeartbeatAck(0, 0.0, 0), peers.Fact(ev.TimeAdvanced()), peers.End(0, "")], ids=repr
)
@in_house
async def test_one_that_does_not_join_first_is_hung_up_on(house, word):
    end = house.connect()
    end.send(word)
    await end.is_lost()
    assert not house.owner.events
    assert not house.owner.words


@in_house
async def test_the_end_is_told_to_everyone_and_nobody_is_lost_by_it(house):
    ends = [(await house.join("n"))[0] for _ in range(5)]
    house.connections.send("n", peers.Evict("x" * (4 << 20)))  # the end is behind it
    await house.connections.end(peers.End(7, "over"), BOUND_S)
    for end in ends:
        assert (await end.is_lost())[1]
        assert end.heard[-1] == peers.End(7, "over")
    assert not house.owner.gone


@in_house
async def test_who_may_not_decide_any_more_hangs_up_without_a_word(house):
    """The others choose another coordinator: they are not lost because this one is."""
    ends = [(await house.join("n"))[0] for _ in range(3)]
    await house.connections.end(None)
    for end in ends:
        assert (await end.is_lost())[1]
        assert len(end.heard) == 2  # what it heard when it joined
    assert not house.owner.gone


@in_house
async def test_after_the_end_nobody_is_taken_in(house):
    await house.connections.end(peers.End(0, "over"))
    end = house.connect()
    end.send(peers.Join(ev.Place("late"), {}))
    await end.is_lost()
    assert not house.owner.events


@in_house
async def test_the_end_does_not_wait_long_for_one_that_does_not_read(house):
    ours, deaf = tagged_pair()
    with deaf:
        house.connections.accept(ours)
        deaf.send(peers.encode(peers.Join(ev.Place("deaf"), {})))
        await house.owner.until(lambda: house.owner.events)
        other, _ = await house.join("n")
        house.connections.send("deaf", peers.Evict("x" * (4 << 20)))
        await house.connections.end(peers.End(0, "over"), 0.2)
        await other.is_lost()
        assert other.heard[-1] == peers.End(0, "over")


@pytest.mark.parametrize(
    "word",
    [
        peers.ResumeLink("n", 1, 2),
        peers.ResumeLink("n", 0, 2),
        peers.Rejoin("n", ev.Place("n"), ev.NodeResynced("n", ())),
        peers.Join(ev.Place("n"), {}),
    ],
    ids=repr,
)
@in_house
async def test_a_node_whose_connection_broke_learns_the_end_when_it_connects_again(house, word):
    end, name = await house.join("n")
    end.close()
    assert await house.gone() == name
    ending = asyncio.ensure_future(house.connections.end(peers.End(0, "over"), BOUND_S))
    await asyncio.sleep(0)
    again = house.connect()
    again.send(word)
    assert await again.hears(1) == [peers.End(0, "over")]
    if isinstance(word, peers.Join):
        last = house.connect()
        assert not ending.done(), "that was not the node that is waited for"
        last.send(peers.ResumeLink(name, 1, 2))
    await ending


@in_house
async def test_a_frame_that_was_tampered_with_ends_the_connection_and_not_the_node(house, caplog):
    """Otherwise whoever can change one byte on its way could have a node declared lost: it connects again."""
    end, node = await house.join()
    end.link._sending._key = bytes(32)
    end.send(peers.Fact(ev.TimeAdvanced()))
    assert await house.gone() == node
    assert "altered, lost, repeated or moved" in caplog.text
    assert house.owner.events == [ev.NodeJoined(node, ev.Place("n"))]
    again = house.connect()
    again.send(peers.ResumeLink(node, 1, 2))
    assert await again.hears(1) == [peers.LinkResumed(0)]
