"""Copies are always elsewhere, evenly, and stay where they are as long as that is as good."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import buddies
from deadpool_run.core.decision import Decision
from deadpool_run.core.events import Place
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord, Shortage
from deadpool_run.core.transitions import JobPhase


def world(count, per_node, replicas, leaves=("",), shards=0):
    """Ranks whose numbers differ by `shards` hold the same; 0: none do."""
    settings = Settings(world_size=count * per_node, nodes=count, replicas=replicas)
    state = coordinator.new_state(settings)
    nodes = {f"n{at}": NodeRecord(f"n{at}", Place(failure_domain=leaves[at % len(leaves)]), at) for at in range(count)}
    seats = tuple(
        replace(seat, node=f"n{seat.rank // per_node}", like=seat.rank % shards if shards else None)
        for seat in state.seats
    )
    return settings, replace(state, nodes=nodes, seats=seats, arrivals=count)


def shortages_of(settings, state):
    """Some nodes refuse some ranks, or have refused them."""
    ranks = st.frozensets(st.integers(0, settings.world_size - 1), max_size=3)
    one = st.builds(Shortage, refused=ranks, wait_s=st.just(60.0), until=st.sampled_from([None, 60.0]))
    return st.dictionaries(st.sampled_from(sorted(state.nodes)), one, max_size=3)


WORLDS = st.tuples(st.integers(2, 9), st.integers(1, 4), st.integers(1, 3), st.sampled_from([("",), ("x", "y")]))
SHARDS = st.integers(0, 8)


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
def test_another_failure_domain_is_chosen_where_there_is_one(shape):
    count, per_node, _, _ = shape
    settings, state = world(count, per_node, 1, ("x", "y"))
    for seat, (holder,) in zip(state.seats, buddies.choose(settings, state), strict=True):
        assert state.nodes[holder].place.failure_domain != state.nodes[seat.node].place.failure_domain


def test_copies_are_where_the_same_is_already():
    """HSDP over four nodes of two: each rank's shard is on one other node."""
    settings, state = world(4, 2, 1, shards=4)
    assert buddies.choose(settings, state) == (("n2",), ("n2",), ("n3",), ("n3",), ("n0",), ("n0",), ("n1",), ("n1",))


def test_another_failure_domain_is_worth_more_than_what_is_there_already():
    settings, state = world(4, 2, 1, ("x", "y"), shards=4)  # n0 and n2 share a failure domain
    assert [state.nodes[holder].place.failure_domain for (holder,) in buddies.choose(settings, state)] == [*"yyxxyyxx"]


@given(WORLDS, SHARDS, st.data())
def test_what_need_not_change_does_not(shape, shards, data):
    settings, state = world(*shape, shards)
    state = replace(state, buddies=buddies.choose(settings, state))
    assert buddies.choose(settings, state) == state.buddies
    state = replace(state, shortages=data.draw(shortages_of(settings, state)))
    state = replace(state, buddies=buddies.choose(settings, state))
    assert buddies.choose(settings, state) == state.buddies
    lost = data.draw(st.sampled_from(sorted(state.nodes)))
    left = replace(
        state,
        nodes={name: node for name, node in state.nodes.items() if name != lost},
        shortages={name: shortage for name, shortage in state.shortages.items() if name != lost},
    )
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

        def preference(node, rank=seat.rank, home=home, before=before, start=start):
            near = (
                home is not None
                and node.place.failure_domain != ""
                and node.place.failure_domain == home.place.failure_domain
            )
            around = (node.arrival - start) % (state.arrivals + 1)
            like = state.seats[rank].like
            same = like is not None and any(each.like == like and each.node == node.node for each in state.seats)
            full = load[node.node] >= most
            shortage = state.shortages.get(node.node)
            keeps = node.node in before and shortage is not None and rank not in shortage.refused
            short = shortage is not None and shortage.until is not None and not keeps
            return short, near or not same, near, full, node.node not in before, load[node.node], around

        others = sorted((node for node in state.nodes.values() if node is not home), key=preference)
        best = [node.node for node in others[:replicas]]
        load.update(best)
        chosen.append(tuple(sorted(best, key=lambda n, b=before: b.index(n) if n in b else len(b))))
    return tuple(chosen)


@pytest.mark.parametrize("few", [0, 64])
@given(shape=WORLDS, shards=SHARDS, data=st.data())
def test_the_choice_is_the_plain_rules(few, shape, shards, data):
    """From nothing, and through losses, moves and arrivals one after the other."""
    settings, state = world(*shape, shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buddies, "_FEW", few)
        _choose_often(settings, state, data)


def _choose_often(settings, state, data):
    for _ in range(4):
        state = replace(state, shortages=data.draw(shortages_of(settings, state)))
        chosen = buddies.choose(settings, state)
        assert chosen == plainly(settings, state)
        state = replace(state, buddies=chosen)
        if len(state.nodes) > 2 and data.draw(st.booleans()):
            lost = data.draw(st.sampled_from(sorted(state.nodes)))
            state = replace(state, nodes={name: node for name, node in state.nodes.items() if name != lost})
        if data.draw(st.booleans()):
            new = NodeRecord(
                f"new{state.arrivals}", Place(failure_domain=data.draw(st.sampled_from(["", "x"]))), state.arrivals
            )
            state = replace(state, nodes={**state.nodes, new.node: new}, arrivals=state.arrivals + 1)
        rank, at = data.draw(st.integers(0, settings.world_size - 1)), data.draw(st.sampled_from(sorted(state.nodes)))
        seats = tuple(replace(seat, node=at) if seat.rank == rank else seat for seat in state.seats)
        state = replace(state, seats=seats)


def test_one_node_has_no_buddies():
    assert buddies.choose(*world(1, 4, 1)) == ()
    assert buddies.choose(*world(3, 2, 0)) == ()


def test_copies_go_elsewhere_once_all_have_said_whom_they_are_like():
    settings = Settings(world_size=8, nodes=4, replicas=1)
    state = coordinator.new_state(settings)
    told = []

    def tell(event):
        effects = coordinator.step(settings, state, event, float(len(told)))
        told.append(event)
        return [effect.buddies for effect in effects if isinstance(effect, do.SetBuddies)]

    tell(ev.JobSubmitted("n0", Place()))
    for at in range(1, 4):
        tell(ev.NodeJoined(f"n{at}", Place()))
    for worker in list(state.members):
        tell(ev.WorkerStarted(worker, 100 + worker))
        tell(ev.WorkerReady(worker))
    said = []
    for member in list(state.owners()):
        tell(ev.ScriptInitialized(member.worker))
        said.append(tell(ev.TranscriptCompleted(member.worker, member.rank % 4)))
    homes = [seat.node for seat in state.seats]
    assert said[:-1] == [[]] * 7, "every change costs a whole snapshot"
    assert said[-1] == [tuple((homes[(rank + 4) % 8],) for rank in range(8))]
    assert state.former_buddies, "they hold the only copies until others have them"
    assert tell(ev.SnapshotCommitted(0, state.epoch)) == []
    assert not state.former_buddies


def test_the_only_copies_are_kept_while_the_choice_changes_again_and_again():
    settings, state = world(6, 1, 1, leaves=("x", "y"))
    state.phase, state.epoch = JobPhase.RUNNING, 1
    state.buddies = first = tuple((f"n{(seat.rank + 2) % 6}",) for seat in state.seats)
    chosen = [first]
    for seats in (state.seats, [replace(seat, like=seat.rank // 2) for seat in state.seats]):
        decision = Decision(settings, state, 0.0)
        decision.changes.placement, state.seats = True, seats
        buddies.update(decision)
        assert state.buddies not in chosen
        chosen.append(state.buddies)
        for rank, (had,) in enumerate(first):
            assert had in {*state.buddies[rank], *state.former_buddies[rank]}
    buddies.committed(Decision(settings, state, 1.0), ev.SnapshotCommitted(0, 1))
    assert state.former_buddies == ()
