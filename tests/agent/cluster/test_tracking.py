"""A leader's messages to nodes about copies: each is sent once."""

from dataclasses import replace

from deadpool_run.agent.cluster.tracking import Tracking
from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.ids import NodeId
from deadpool_run.wire.peers import Peer, Safe


def job(term=0):
    """Two ranks on two nodes, and a third node."""
    settings = Settings(world_size=2, nodes=2, spare_nodes=1)
    state = coordinator.new_state(settings)
    coordinator.step(settings, state, ev.JobSubmitted(NodeId("a"), ev.Place("a")), 0.0)
    for name in ("b", "c"):
        coordinator.step(settings, state, ev.NodeJoined(NodeId(name), ev.Place(name)), 0.0)
    state.term = term
    state.seats = tuple(replace(seat, node=node) for seat, node in zip(state.seats, "ab", strict=True))
    return settings, state


def told(tracking, state):
    """Return the numbers of the messages to nodes."""
    return {node: news.number for node, news in tracking.buddies_news(state, lambda node: Peer(node, node, 1))}


def test_a_report_about_former_holders_does_not_count():
    """It was sent before its node knew of the present ones. If it counted, the former ones would drop their copies."""
    settings, state = job()
    tracking = Tracking(settings.world_size)
    state.buddies = (("b",), ("a",))
    first = told(tracking, state)
    safe = {number: Safe(0, 0, (7,), transcript=True, buddies=number) for number in (0, first["a"])}
    assert tracking.is_current(state, "a", safe[first["a"]])
    assert not tracking.is_current(state, "a", safe[0])
    assert not tracking.is_current(state, "b", safe[first["a"]]), "the rank lives on another node"
    state.buddies = (("c",), ("a",))
    second = told(tracking, state)
    assert second["a"] != first["a"]
    assert not tracking.is_current(state, "a", safe[first["a"]])
    assert tracking.is_current(state, "a", Safe(0, 0, (7,), transcript=True, buddies=second["a"]))
    assert "b" not in second or second["b"] != first["b"]


def test_leaders_of_other_terms_use_other_numbers():
    numbers = [told(Tracking(settings.world_size), state) for settings, state in (job(1), job(2))]
    assert not {*numbers[0].values()} & {*numbers[1].values()}


def test_a_new_leader_tells_every_node_its_part_once_also_one_that_has_none_now():
    """Under the last leader it may have had a rank, of which it would go on to send copies and reports."""
    settings = Settings(world_size=2, nodes=2, spare_nodes=1)
    state = coordinator.new_state(settings)
    coordinator.step(settings, state, ev.JobSubmitted(NodeId("a"), ev.Place("a")), 0.0)
    for name in ("b", "c"):
        coordinator.step(settings, state, ev.NodeJoined(NodeId(name), ev.Place(name)), 0.0)
    tracking = Tracking(settings.world_size)
    assert {node for node, _ in tracking.buddies_news(state, lambda _: None)} == {"a", "b", "c"}
    assert not list(tracking.buddies_news(state, lambda _: None))


def test_a_leader_of_a_later_term_tells_every_node_again():
    """It may be the same one: what it sent last may be lost with the connections of the earlier term."""
    settings, state = job(1)
    tracking = Tracking(settings.world_size)
    first = told(tracking, state)
    assert not told(tracking, state)
    state.term = 2
    second = told(tracking, state)
    assert second.keys() == first.keys()
    assert not {*first.values()} & {*second.values()}
