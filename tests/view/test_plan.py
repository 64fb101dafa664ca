"""The plan of a job equals the coordinator's decisions when the job begins."""

from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.copies import buddies
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord
from deadpool_run.core.transitions import JobPhase
from deadpool_run.view.plan import begun, plan_lines


def nodes(count, orders=(), leaves=("",)):
    places = [
        ev.Place(f"n{at}", failure_domain=leaves[at % len(leaves)], order=orders[at] if at < len(orders) else None)
        for at in range(count)
    ]
    return [NodeRecord(place.name, place, at) for at, place in enumerate(places)]


def led(settings, present):
    """Return the state of a coordinator whose nodes came in this order, when every rank has a worker."""
    state = coordinator.new_state(settings)
    first, *others = present
    todo = [ev.JobSubmitted(first.node, first.place), *(ev.NodeJoined(each.node, each.place) for each in others)]
    while todo:
        effects = coordinator.step(settings, state, todo.pop(0), 1.0)
        todo += [
            fact
            for effect in effects
            if type(effect).__name__ == "StartWorker"
            for fact in (ev.WorkerStarted(effect.worker, 1), ev.WorkerReady(effect.worker))
        ]
    assert state.phase is JobPhase.SETTING_UP
    return state


@given(
    st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(1, 3)), st.integers(0, 3), st.integers(0, 2), st.data()
)
def test_it_is_what_the_coordinator_does(shape, spares, replicas, data):
    count, spare_nodes, per_node = shape
    settings = Settings(
        world_size=count * per_node, nodes=count, spare_nodes=spare_nodes, spares=spares, replicas=replicas
    )
    machines = count + spare_nodes
    orders = data.draw(st.sampled_from([(), tuple(reversed(range(machines)))]))
    present = nodes(machines, orders, data.draw(st.sampled_from([("",), ("x", "y")])))
    shown, real = begun(settings, present), led(settings, present)
    assert [(seat.node, seat.local_rank) for seat in shown.seats] == [(s.node, s.local_rank) for s in real.seats]
    assert shown.buddies == real.buddies == buddies.choose(settings, real)


def test_the_lines():
    settings = Settings(world_size=6, nodes=3, spare_nodes=1)
    assert list(plan_lines(settings, nodes(4))) == [
        "6 ranks, 2 on each of 3 nodes; spares: 1 node",
        "each rank's snapshots are copied to 1 other node",
        "n0  ranks 0-1; copies of rank 0 on n1; copies of rank 1 on n2",
        "n1  ranks 2-3; copies of rank 2 on n3; copies of rank 3 on n0",
        "n2  ranks 4-5; copies of rank 4 on n3; copies of rank 5 on n0",
        "n3  spare",
    ]


def test_ranks_follow_the_users_order_and_spare_workers_are_shown():
    settings = Settings(world_size=4, nodes=2, spares=1, replicas=0)
    assert list(plan_lines(settings, nodes(2, orders=(1, 0)))) == [
        "4 ranks, 2 on each of 2 nodes; spares: 1 worker",
        "snapshots are not copied to other nodes: a lost node loses the state of its ranks",
        "n1  ranks 0-1",
        "n0  ranks 2-3 and 1 spare worker",
    ]


def test_those_who_are_missing_are_waited_for():
    *_, last = plan_lines(Settings(world_size=4, nodes=4), nodes(1))
    assert last == "waiting for 3 more nodes: the world starts with 4"
    assert list(plan_lines(Settings(world_size=1), [])) == [
        "1 rank; spares: none",
        "waiting for 1 more node: the world starts with 1",
    ]
