"""Drains in the simulated cluster: ranks meet at a step's end and move, with and without faults meanwhile."""

import pytest
from leaders import leaders_simulation
from moves import check_moves, moves_simulation, node_moves_simulation
from outages import MOVES

from deadpool_run.core import coordinator, reports
from deadpool_run.core import events as ev
from deadpool_run.core.decision import Decision
from deadpool_run.core.recovery import relocation

SEEDS_FOR_A_PLANT = 150


def run(seed, story):
    job = story(seed)
    try:
        job.run()
        check_moves(job)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return job


@pytest.mark.parametrize("part", range(2))
def test_ranks_move(part):
    jobs = [run(seed, moves_simulation) for seed in range(part, 150, 2)]
    assert sum(len(job.moved) for job in jobs) > 30
    assert sum("is not drained', reason='rank" in line for job in jobs for line in job.log) > 3


@pytest.mark.parametrize("part", range(2))
def test_nodes_are_drained_and_leave(part):
    jobs = [run(seed, node_moves_simulation) for seed in range(part, 150, 2)]
    assert sum(len(job.left) for job in jobs) > 20
    assert sum(job.stopped.exit_code == 0 for job in jobs) > 60


def test_leaders_are_lost_while_ranks_move():
    jobs = [leaders_simulation(seed, MOVES) for seed in range(100)]
    for seed, job in enumerate(jobs):
        try:
            job.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert sum(len(job.left) for job in jobs) > 4
    assert sum(len(job.terms) > 1 and bool(job.moves) for job in jobs) > 3


@pytest.mark.parametrize("seed", [1007, 1119, 1605, 1776, 2482])
def test_seeds_that_found_bugs(seed):
    run(seed, node_moves_simulation)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [150, 1100, 2050])
def test_many_more(first):
    for seed in range(first, first + 950):
        run(seed, moves_simulation)
        run(seed, node_moves_simulation)


# --- planted bugs -----------------------------------------------------------------------------------------------------


def on_limited(patch, limited):
    patch.setitem(coordinator.HANDLERS, ev.StepsLimited, reports.in_epoch(reports.accepted(limited)))


def ranks_are_not_waited_for(patch):
    def limited(decision, member, event):
        relocation.limited(decision, member, event)
        if decision.state.relocation is not None:
            decision.state.relocation.waiting.clear()

    on_limited(patch, limited)


def the_first_answer_is_the_limit(patch):
    def limited(decision, member, event):
        under_way = decision.state.relocation
        before = None if under_way is None else under_way.limit
        relocation.limited(decision, member, event)
        if under_way is not None and not under_way.is_set and before:
            under_way.limit = before

    on_limited(patch, limited)


def a_loss_during_a_drain_counts_as_planned(patch):
    patch.setattr(relocation, "is_planned", lambda state, _member: state.relocation is not None)


def limits_outlive_the_drain(patch):
    honest = relocation.give_up

    def give_up(decision, why):
        if decision.state.relocation is not None:
            decision.state.relocation.meets_in = 0
        honest(decision, why)

    patch.setattr(relocation, "give_up", give_up)


def a_drained_node_keeps_its_spares(patch):
    patch.setattr(Decision, "close_node", lambda decision, node: setattr(decision.state, "closed", {node}))


def a_node_leaves_with_copies(patch):
    patch.setattr(relocation, "_has_needed_copies", lambda _state, _node: False)


PLANTS = {
    ranks_are_not_waited_for: moves_simulation,
    the_first_answer_is_the_limit: moves_simulation,
    a_loss_during_a_drain_counts_as_planned: moves_simulation,
    limits_outlive_the_drain: moves_simulation,
    a_drained_node_keeps_its_spares: node_moves_simulation,
    a_node_leaves_with_copies: node_moves_simulation,
}


@pytest.mark.parametrize(("plant", "story"), PLANTS.items(), ids=[plant.__name__ for plant in PLANTS])
def test_a_planted_bug_is_found(plant, story, monkeypatch):
    plant(monkeypatch)
    for seed in range(SEEDS_FOR_A_PLANT):
        try:
            run(seed, story)
        except AssertionError:
            return
    pytest.fail(f"{SEEDS_FOR_A_PLANT} seeds did not find the bug")
