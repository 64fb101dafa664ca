"""A node's record of its workers' orders, for a leader whose log lacks them."""

from deadpool_run.agent.node.inventory import Inventory
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev


def start(inventory, worker, pid):
    inventory.ordered(do.StartWorker(worker, "n"), 1)
    inventory.reported(ev.WorkerStarted(worker, pid))


def found(inventory):
    return {each.worker: each for each in inventory.report("n", ()).workers}


def test_a_spare_that_was_ordered_to_rehearse_is_known_for_it():
    inventory = Inventory()
    start(inventory, 5, 100)
    start(inventory, 6, 101)
    inventory.ordered(do.PrepareSpare(5, 0, 1, 0), 1)
    assert [found.prepared for found in inventory.report("n", ()).workers] == [True, False]


def test_a_worker_is_known_from_the_order_to_start_it():
    """The next leader would start another in its place, and never end this one."""
    inventory = Inventory()
    inventory.ordered(do.StartWorker(5, "n"), 1)
    assert (found(inventory)[5].pid, found(inventory)[5].alive) == (None, True)
    inventory.ordered(do.DismissWorker(5), 1)
    inventory.reported(ev.WorkerStarted(5, 100))
    assert (found(inventory)[5].pid, found(inventory)[5].dismissed) == (100, True)
    inventory.ordered(do.StartWorker(6, "n"), 1)
    inventory.reported(ev.WorkerStartFailed(6, "no memory"))
    assert list(found(inventory)) == [5]


def test_of_ended_workers_only_the_last_owner_of_each_rank_is_kept():
    inventory = Inventory()
    for worker in range(1000):
        start(inventory, worker, 100 + worker)
        if worker % 2:
            inventory.ordered(do.AssignRank(worker, worker % 4 // 2, worker, False, 0), 1)
        inventory.reported(ev.WorkerExited(worker, None, 9))
    assert {worker: each.rank for worker, each in found(inventory).items()} == {997: 0, 999: 1}


def test_a_version_to_resume_from_is_known_in_the_epoch_of_its_order_only():
    inventory = Inventory()
    assert inventory.resume_of(1) is None
    inventory.ordered(do.DiscardAbove(1, 7), 1)
    assert inventory.resume_of(1) == 7
    assert inventory.resume_of(2) is None


def test_orders_to_discard_are_told_unless_a_later_one_covers_them():
    inventory = Inventory()
    assert inventory.report("n", ()).discarded == (0, -1)
    for order in ((2, 5), (4, 20), (6, 10), (6, 10), (8, 30)):
        inventory.ordered(do.DiscardAbove(*order), 1)
    told = inventory.report("n", ())
    assert told.discarded == (8, 30)
    assert told.earlier == ((2, 5), (6, 10))
    inventory.ordered(do.BeginGeneration(1), 1)
    assert inventory.report("n", ()).discarded == (0, -1)
