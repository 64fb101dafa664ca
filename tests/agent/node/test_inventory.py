"""A node's record of its workers' orders, for a leader whose log lacks them."""

from deadpool_run.agent.node.inventory import Inventory
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev


def test_a_spare_that_was_ordered_to_rehearse_is_known_for_it():
    inventory = Inventory()
    inventory.reported(ev.WorkerStarted(5, 100))
    inventory.reported(ev.WorkerStarted(6, 101))
    inventory.ordered(do.PrepareSpare(5, 0, 1, 0), 1)
    assert [found.prepared for found in inventory.report("n", ()).workers] == [True, False]
