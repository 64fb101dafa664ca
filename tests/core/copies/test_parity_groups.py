"""Ranks that share a parity, and the parity, are all on different nodes, evenly, and stay as they are where they can."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.core import coordinator
from deadpool_run.core.copies import buddies
from deadpool_run.core.events import Place
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord, Shortage

SHAPES = st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(2, 5), st.integers(0, 2))


def world(count, per_node, ranks_per_parity, reserve=0, domains=("",)):
    """Some nodes with ranks, and some in reserve."""
    settings = Settings(world_size=count * per_node, nodes=count, ranks_per_parity=ranks_per_parity)
    state = coordinator.new_state(settings)
    names = [f"n{at}" for at in range(count + reserve)]
    nodes = {
        name: NodeRecord(name, Place(failure_domain=domains[at % len(domains)]), at) for at, name in enumerate(names)
    }
    seats = tuple(replace(seat, node=f"n{seat.rank // per_node}") for seat in state.seats)
    return settings, replace(state, nodes=nodes, seats=seats, arrivals=len(names))


def arranged(settings, state):
    """Return the state with its choice, which must keep every rule."""
    chosen, groups = buddies.arrange(settings, state)
    home = {seat.rank: seat.node for seat in state.seats}
    most = min(settings.ranks_per_parity, len(state.nodes) - 1)
    grouped = [rank for group in groups for rank in group]
    assert len(grouped) == len(set(grouped)), "a rank is in two groups"
    for group in groups:
        assert 1 < len(group) <= most
        assert list(group) == sorted(group)
        assert len({home[rank] for rank in group}) == len(group), "two ranks of a group may be lost at once"
        assert len({chosen[rank] for rank in group}) == 1
    for rank, holders in enumerate(chosen):
        (holder,) = holders
        assert holder in state.nodes
        assert all(home[each] != holder for group in groups if rank in group for each in group)
        assert home[rank] != holder
    return replace(state, buddies=chosen, parity_groups=groups)


def all_groups(state):
    grouped = {rank for group in state.parity_groups for rank in group}
    return [*state.parity_groups, *((seat.rank,) for seat in state.seats if seat.rank not in grouped)]


@given(SHAPES)
def test_there_are_as_few_parities_as_the_nodes_allow_and_they_are_spread(shape):
    settings, state = world(*shape)
    state = arranged(settings, state)
    most = min(settings.ranks_per_parity, len(state.nodes) - 1)
    per_group = min(most, settings.nodes)
    assert len(all_groups(state)) == -(-settings.world_size // per_group)
    held = Counter(state.buddies[group[0]][0] for group in all_groups(state))
    assert max(held.values()) <= -(-len(all_groups(state)) // len(state.nodes)) + settings.ranks_per_node


@given(SHAPES, st.data())
def test_through_losses_moves_arrivals_and_refusals(shape, data):
    settings, state = world(*shape, data.draw(st.sampled_from([("",), ("x", "y"), ("x", "x", "y", "")])))
    for _ in range(4):
        state = arranged(settings, state)
        assert arranged(settings, state) == state, "without a reason it changes"
        if len(state.nodes) > 2 and data.draw(st.booleans()):
            lost = data.draw(st.sampled_from(sorted(state.nodes)))
            rest = {name: node for name, node in state.nodes.items() if name != lost}
            new = {seat.rank: data.draw(st.sampled_from(sorted(rest))) for seat in state.seats if seat.node == lost}
            seats = tuple(replace(seat, node=new.get(seat.rank, seat.node)) for seat in state.seats)
            state = replace(state, nodes=rest, seats=seats, shortages={})
        if data.draw(st.booleans()):
            record = NodeRecord(f"new{state.arrivals}", Place(), state.arrivals)
            state = replace(state, nodes={**state.nodes, record.node: record}, arrivals=state.arrivals + 1)
        if data.draw(st.booleans()):
            short = Shortage(frozenset({0}), 60.0, 60.0)
            state = replace(state, shortages={data.draw(st.sampled_from(sorted(state.nodes))): short})


def test_groups_of_ranks_that_stay_do_too():
    settings, state = world(6, 1, 2, reserve=1)
    before = arranged(settings, state)
    moved = tuple(replace(seat, node="n6") if seat.rank == 0 else seat for seat in before.seats)
    nodes = {name: node for name, node in before.nodes.items() if name != "n0"}
    after = arranged(settings, replace(before, seats=moved, nodes=nodes))
    assert before.parity_groups == after.parity_groups == ((0, 1), (2, 3), (4, 5))


def test_a_group_is_in_different_failure_domains_where_there_are_enough():
    settings, state = world(6, 2, 2, domains=("x", "x", "y", "y", "z", "z"))
    state = arranged(settings, state)
    domain = {name: node.place.failure_domain for name, node in state.nodes.items()}
    for group in state.parity_groups:
        places = [*(domain[state.seats[rank].node] for rank in group), domain[state.buddies[group[0]][0]]]
        assert len(set(places)) == 3, f"one domain may take two of {group} or its parity"


def test_a_node_without_memory_gets_no_parity():
    settings, state = world(4, 1, 2, reserve=2)
    state = arranged(settings, state)
    holder = state.buddies[0][0]
    state = arranged(settings, replace(state, shortages={holder: Shortage(frozenset({0}), 60.0, 60.0)}))
    assert all(holder not in holders for holders in state.buddies)


def test_two_nodes_keep_copies():
    settings, state = world(2, 2, 4)
    assert arranged(settings, state).parity_groups == ()


@pytest.mark.parametrize("wrong", [{"ranks_per_parity": 0}, {"ranks_per_parity": 2, "replicas": 2}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=r"ranks_per_parity|replicas"):
        Settings(world_size=2, **wrong)
