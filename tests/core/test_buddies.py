"""Copies are always elsewhere, evenly, and stay where they are as long as that is as good."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.core import buddies, coordinator
from deadpool_run.core.events import Place
from deadpool_run.core.membership import Node
from deadpool_run.core.settings import Settings


def world(count, per_node, replicas, leaves=("",)):
    settings = Settings(world_size=count * per_node, nodes=count, replicas=replicas)
    state = coordinator.new_state(settings)
    nodes = {f"n{at}": Node(f"n{at}", Place(leaf=leaves[at % len(leaves)]), at) for at in range(count)}
    seats = tuple(replace(seat, node=f"n{seat.rank // per_node}") for seat in state.seats)
    return settings, replace(state, nodes=nodes, seats=seats, arrivals=count)


WORLDS = st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(1, 3), st.sampled_from([("",), ("x", "y")]))


@given(WORLDS)
def test_copies_are_on_other_nodes_and_evenly_spread(shape):
    settings, state = world(*shape)
    chosen = buddies.choose(settings, state)
    replicas = min(settings.replicas, settings.nodes - 1)
    for seat, holders in zip(state.seats, chosen, strict=True):
        assert len(set(holders)) == replicas
        assert seat.node not in holders
    if shape[3] == ("",):
        load = Counter(node for holders in chosen for node in holders)
        assert max(load.values()) <= -(-settings.world_size * replicas // settings.nodes) + 1


@given(WORLDS)
def test_another_leaf_is_chosen_where_there_is_one(shape):
    count, per_node, _, _ = shape
    settings, state = world(count, per_node, 1, ("x", "y"))
    for seat, (holder,) in zip(state.seats, buddies.choose(settings, state), strict=True):
        assert state.nodes[holder].place.leaf != state.nodes[seat.node].place.leaf


@given(WORLDS, st.data())
def test_what_need_not_change_does_not(shape, data):
    settings, state = world(*shape)
    state = replace(state, buddies=buddies.choose(settings, state))
    assert buddies.choose(settings, state) == state.buddies
    lost = data.draw(st.sampled_from(sorted(state.nodes)))
    left = replace(state, nodes={name: node for name, node in state.nodes.items() if name != lost})
    again = buddies.choose(settings, left)
    assert all(lost not in holders for holders in again)
    settled = replace(left, buddies=again)
    assert buddies.choose(settings, settled) == again


def plainly(settings, state):
    """The rule in its plainest words, at the cost of looking at every node for every rank."""
    replicas = min(settings.replicas, len(state.nodes) - 1)
    most = -(-settings.world_size * replicas // len(state.nodes))
    load, chosen = Counter(), []
    for seat in state.seats:
        home, before = state.nodes.get(seat.node), state.buddies[seat.rank] if state.buddies else ()
        start = 0 if home is None else home.arrival + 1

        def preference(node, home=home, before=before, start=start):
            near = home is not None and node.place.leaf != "" and node.place.leaf == home.place.leaf
            around = (node.arrival - start) % (state.arrivals + 1)
            return near, load[node.node] >= most, node.node not in before, load[node.node], around

        others = sorted((node for node in state.nodes.values() if node is not home), key=preference)
        best = [node.node for node in others[:replicas]]
        load.update(best)
        chosen.append(tuple(sorted(best, key=lambda n, b=before: b.index(n) if n in b else len(b))))
    return tuple(chosen)


@given(WORLDS, st.data())
def test_the_choice_is_the_plain_rules(shape, data):
    """From nothing, and through losses, moves and arrivals one after the other."""
    settings, state = world(*shape)
    for _ in range(4):
        chosen = buddies.choose(settings, state)
        assert chosen == plainly(settings, state)
        state = replace(state, buddies=chosen)
        if len(state.nodes) > 2 and data.draw(st.booleans()):
            lost = data.draw(st.sampled_from(sorted(state.nodes)))
            state = replace(state, nodes={name: node for name, node in state.nodes.items() if name != lost})
        if data.draw(st.booleans()):
            new = Node(f"new{state.arrivals}", Place(leaf=data.draw(st.sampled_from(["", "x"]))), state.arrivals)
            state = replace(state, nodes={**state.nodes, new.node: new}, arrivals=state.arrivals + 1)
        rank, at = data.draw(st.integers(0, settings.world_size - 1)), data.draw(st.sampled_from(sorted(state.nodes)))
        seats = tuple(replace(seat, node=at) if seat.rank == rank else seat for seat in state.seats)
        state = replace(state, seats=seats)


def test_one_node_has_no_buddies():
    assert buddies.choose(*world(1, 4, 1)) == ()
    assert buddies.choose(*world(3, 2, 0)) == ()
